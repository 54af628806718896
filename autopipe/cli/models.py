"""From the name of a model on the command line to the model and example inputs.

::

    package.module:factory   a model, (model, args) or (model, args, kwargs), or a class or function without
                             arguments that returns one of these
    path/to/file.py:factory  the same, from a file
    hf:CONFIG                a transformers config.json or a directory that holds one; random weights
    timm:NAME                a timm model without pretrained weights
    torchvision:NAME         a torchvision model without pretrained weights

Nothing is downloaded. Capturing the model is left to ``tracing``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import pathlib
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..arguments import brief
from ..errors import InputError, ModelError
from ..tracing.inputs.examples import infer

__all__ = ["Loaded", "Sizes", "load"]


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What the command line says about inputs: batch and sequence length, shapes given outright, dtype.

    A length that is None is what suits; one that is given is kept to, or refused.
    """

    batch: int | None = None
    seq: int | None = None
    inputs: tuple[str, ...] = ()
    dtype: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A model and the inputs to capture it with, which have the lengths that they ``follows``."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    follows: tuple[str, ...] = ()


_BATCH, _SEQ = 8, 128


def load(name: str, *, meta: bool = False, device: str | None = None, sizes: Sizes | None = None) -> Loaded:
    """The model that ``name`` means, in training mode; on the meta device with ``meta``.

    Raises :class:`InputError` when the name cannot be understood or found, or lengths are asked for that its
    inputs would not have; :class:`ModelError` when making the model fails.
    """
    sizes = sizes or Sizes()
    if sizes.inputs:
        _keep_to(sizes, (), "--input gives every size; write it there")
    kind, _, rest = name.partition(":")
    if not rest:
        raise InputError(
            f"cannot read {name!r} as a model; write package.module:factory, file.py:factory, "
            "hf:CONFIG.json, timm:NAME or torchvision:NAME"
        )
    where = _there("meta" if meta else device or "cpu")
    special = {"hf": _transformers, "timm": _timm, "torchvision": _torchvision}
    with _dtype(sizes.dtype), where:
        if kind in special:
            loaded = special[kind](rest, sizes)
        else:
            loaded = _factory(name, sizes)
        if sizes.inputs:
            loaded = Loaded(loaded.model, tuple(map(_tensor, sizes.inputs)))
        else:
            if not loaded.args and not loaded.kwargs:
                loaded = _inferred(loaded.model, name)
            own = f"the inputs of {name} have sizes of their own; leave it out, or give shapes with --input"
            _keep_to(sizes, loaded.follows, own)
    return dataclasses.replace(loaded, model=loaded.model.train())


def _keep_to(sizes: Sizes, follows: Collection[str], instead: str) -> None:
    """Raise :class:`InputError` for lengths that were asked for but would change nothing."""
    asked = {"batch": sizes.batch, "seq": sizes.seq}
    idle = [f"--{what} {n}" for what, n in asked.items() if n is not None and what not in follows]
    if idle:
        raise InputError(f"{' and '.join(idle)} would change nothing: {instead}")


def _there(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch without a device's code asserts that it has it
        raise InputError(
            f"device {name!r} is not available here: {str(error).splitlines()[0]}; take cpu, or estimate for "
            "described hardware, such as H100"
        ) from None


@contextlib.contextmanager
def _dtype(name: str | None) -> Any:
    """Floating-point tensors are made in this dtype."""
    if name is None:
        yield
        return
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InputError(f"{name!r} is no floating-point dtype; write float32, bfloat16, float16 or float64")
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
    except TypeError as error:  # of 8 bits: torch makes no model in them
        raise InputError(f"no model can be made in {name}; write float32, bfloat16 or float64") from error
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _tensor(text: str) -> torch.Tensor:
    """``8x3x224x224`` or ``8x128:int64`` as an example tensor; of the model's dtype where none is said."""
    match = re.fullmatch(r"([1-9]\d{0,17}(?:[x,][1-9]\d{0,17})*)(?::(\w+))?", text, re.ASCII)
    dtype = getattr(torch, match.group(2), None) if match and match.group(2) else torch.get_default_dtype()
    if match is None or not isinstance(dtype, torch.dtype):
        raise InputError(
            f"cannot read input {brief(text)}; write its sizes and dtype like 8x3x224x224 or 8x128:int64"
        )
    shape = tuple(int(n) for n in re.split("[x,]", match.group(1)))
    try:
        return (
            torch.randn(shape, dtype=dtype, device="cpu")
            if dtype.is_floating_point
            else torch.zeros(shape, dtype=dtype, device="cpu")
        )
    except (RuntimeError, TypeError) as error:  # too large for the memory, or for torch to count
        raise InputError(f"cannot make input {text!r}: {error}") from error


def _factory(name: str, sizes: Sizes) -> Loaded:
    path, _, attribute = name.rpartition(":")
    module = _from_file(pathlib.Path(path)) if path.endswith(".py") else _from_package(path)
    found = _attribute(module, path, attribute)
    is_made = isinstance(found, nn.Module) or not callable(found)
    made = found if is_made else _make(found, name)
    model, *rest = made if isinstance(made, tuple) and made else (made,)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{name} {'is' if is_made else 'made'} a {type(model).__name__}, not an nn.Module; return the "
            "model, or (model, args)"
        )
    args, kwargs = rest[0] if rest else (), rest[1] if len(rest) > 1 else {}
    if len(rest) > 2 or not isinstance(kwargs, Mapping):
        raise InputError(
            f"{name} gives {brief([type(x).__name__ for x in made])}; return (model, args, kwargs), the last "
            "a dict of arguments by name"
        )
    return Loaded(model, tuple(args) if isinstance(args, (tuple, list)) else (args,), dict(kwargs))


def _attribute(module: Any, path: str, attribute: str) -> Any:
    try:
        return getattr(module, attribute)
    except AttributeError:
        known = [
            k
            for k, v in vars(module).items()
            if callable(v) and getattr(v, "__module__", "") == module.__name__
        ]
        offer = f"; it has {', '.join(known[:8])}" if known else ""
        raise InputError(f"{path} has no {attribute!r}{offer}") from None


def _make(factory: Any, name: str) -> Any:
    try:
        takes = list(inspect.signature(factory).parameters.values())
    except ValueError:  # what is built in may have no signature
        takes = []
    required = [
        p.name
        for p in takes
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if required:
        raise InputError(
            f"{name} needs {', '.join(required)}; name a function without required arguments that returns "
            "the model, or (model, args)"
        )
    with _failing(f"{name} failed while making the model"):
        return factory()


@contextlib.contextmanager
def _failing(told: str) -> Iterator[None]:
    """Runs code of the model's: what it raises, or that it ends the process, is its failure."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ModelError(told) from error


def _from_package(path: str) -> Any:
    if not all(map(str.isidentifier, path.split("."))):
        raise InputError(f"{path!r} is no name of a package; give package.module:factory or file.py:factory")
    sys.path.insert(0, "")
    try:
        with _failing(f"{path} failed while it was imported"):
            return importlib.import_module(path)
    except ModelError as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            raise InputError(
                f"cannot import {path!r}: {error.__cause__}; install it, or name a file as "
                "path/to/file.py:factory"
            ) from None
        raise
    finally:
        sys.path.remove("")


def _from_file(path: pathlib.Path) -> Any:
    # a file may be called as a package is that all else goes on with
    known = sys.modules.get(path.stem)
    is_free = known is None or getattr(known, "__file__", None) == str(path)
    name = path.stem if is_free else f"{path.stem} of {path.parent}"
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise InputError(f"there is no file {path}; give path/to/file.py:factory")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        with _failing(f"{path} failed while it was imported"):
            spec.loader.exec_module(module)
    except ModelError as error:
        del sys.modules[name]
        if "relative import" in str(error.__cause__):
            raise InputError(
                f"{path} is part of a package, from which it imports; give package.module:factory, in the "
                "folder that holds the package or with it installed"
            ) from None
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module


def _transformers(where: str, sizes: Sizes) -> Loaded:
    transformers = _library("transformers", "transformers")
    path = pathlib.Path(where)
    if not (path.is_file() or (path / "config.json").is_file()):
        raise InputError(
            f"hf:{where}: no such config.json or directory that holds one; nothing is downloaded"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(str(path))
        if hasattr(config, "use_cache"):
            config.use_cache = False
        names = getattr(config, "architectures", None) or ()
        cls = next((getattr(transformers, n) for n in names if hasattr(transformers, n)), None)
        model = cls(config) if cls is not None else transformers.AutoModel.from_config(config)
    except Exception as error:
        raise ModelError(f"hf:{where}: transformers cannot make this model") from error
    made = _text_inputs(model, config, sizes)
    return Loaded(model, (), made, follows=("batch", "seq") if made else ())


def _text_inputs(model: nn.Module, config: Any, sizes: Sizes) -> dict[str, Any]:
    """Token ids, and labels where the model computes its loss from as many; empty for other models."""
    takes = inspect.signature(model.forward).parameters
    if "input_ids" not in takes or getattr(model, "main_input_name", "input_ids") != "input_ids":
        return {}
    top = getattr(config, "vocab_size", None) or 2
    ids = torch.randint(0, top, (sizes.batch or _BATCH, sizes.seq or _SEQ), device="cpu")
    is_seq2seq = getattr(config, "is_encoder_decoder", False)
    out = {"input_ids": ids}
    if is_seq2seq and "decoder_input_ids" in takes:
        out["decoder_input_ids"] = ids.clone()
    name = type(model).__name__
    if "labels" in takes and ("LMHead" in name or "CausalLM" in name or "ConditionalGeneration" in name):
        out["labels"] = ids.clone()
    return out


def _timm(name: str, sizes: Sizes) -> Loaded:
    timm = _library("timm", "timm")
    try:
        model = timm.create_model(name)
    except Exception as error:
        raise InputError(f"timm has no model {name!r}: {error}") from None
    channels, height, width = getattr(model, "default_cfg", {}).get("input_size", (3, 224, 224))
    return _seeing(model, sizes, channels, height, width)


def _torchvision(name: str, sizes: Sizes) -> Loaded:
    torchvision = _library("torchvision", "torchvision")
    try:
        model = torchvision.models.get_model(name, weights=None)
    except ValueError as error:
        raise InputError(f"torchvision has no model {name!r}: {error}") from None
    side = 299 if name == "inception_v3" else 224
    return _seeing(model, sizes, 3, side, side)


def _seeing(model: nn.Module, sizes: Sizes, *picture: int) -> Loaded:
    """A model of pictures, and a batch of them of channels, height and width."""
    return Loaded(model, (torch.randn(sizes.batch or _BATCH, *picture, device="cpu"),), follows=("batch",))


def _inferred(model: nn.Module, name: str) -> Loaded:
    try:
        return Loaded(model, *infer(model))
    except InputError:
        raise InputError(
            f"{name} does not tell its inputs; give their shapes in order, such as --input 8x128:int64, or "
            "name a function that returns (model, args)"
        ) from None


def _library(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InputError(f"{name}: models need {name}: pip install {package}") from None
    except Exception as error:  # torchvision's compiled part checks the torch it is loaded by
        raise InputError(
            f"{name} is installed but cannot be imported: {error}; install the build of it (and of "
            f"torchvision) that goes with torch {torch.__version__}"
        ) from None
