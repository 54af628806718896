"""What the arguments of the verbs may be, checked before any work is done; numbers become Python's own.

What arguments mean is told where they are taken, in ``planning``, ``measure`` and ``solve``.
"""

from __future__ import annotations

import difflib
import inspect
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..arguments import Check, brief, flag, mapping, names, number, one_of, whole, word
from ..costs import CostTable
from ..errors import InputError
from ..hardware import Cluster, Device
from ..measure import Store
from ..presets import OFFLOADS, OPTIMIZERS, PRECISIONS
from ..schedule import NAMES
from ..solve import CHECKS
from ..torch_private import CALL_HOOK
from ..tracing import Capture

__all__ = ["check_model", "check_names", "check_whole", "checked"]

MOST_STAGES = MOST_MICROBATCHES = 2**16
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
"""What makes replicas or shards of a model on other ranks."""


def check_model(model: Any, args: Any, kwargs: Any) -> None:
    """Raise :class:`InputError` for what is no model, or no example arguments."""
    if not isinstance(model, (nn.Module, Capture)):
        raise InputError(f"model is {brief(model)}; it must be a torch.nn.Module")
    if isinstance(model, nn.Module):
        _check_unwrapped(model)
    if not isinstance(args, (tuple, list)):
        raise InputError(
            f"args is a {type(args).__name__}; it must be a tuple of the model's arguments, such as (x,)"
        )
    if kwargs is not None:
        mapping("kwargs", kwargs, "a dict of the model's keyword arguments")


def _check_unwrapped(model: nn.Module) -> None:
    name = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            f"model is a {name}, which runs outside Python as one; split the nn.Module that "
            "it was made of, in which scripted parts may stay"
        )
    if "_modules" not in vars(model):
        raise InputError(
            f"model is a {name} whose __init__ does not call super().__init__(); let it do so first"
        )
    if isinstance(getattr(model, "graph", None), Capture):
        raise InputError(
            "model is a pipe, which is split; to split it otherwise give pipe.graph or pipe.model"
        )
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise InputError(
            "model is compiled by torch.compile, which runs it as one; split the model itself, and compile "
            "its stages with rt.wrap(torch.compile)"
        )
    if type(model).forward is nn.Module.forward and "forward" not in vars(model):
        raise InputError(
            f"model is a {name}, which has no forward; give the module that calls its parts, or nn.Sequential"
        )
    if getattr(model, CALL_HOOK, None) is not None:
        raise InputError(
            "model.compile() has it run as one; split it before, and compile its stages with "
            "rt.wrap(torch.compile)"
        )
    check_whole(model)


def check_whole(model: nn.Module) -> None:
    """Raise :class:`InputError` where what makes replicas or shards wraps a model, or part of it."""
    for path, module in model.named_modules():
        wrapper = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in WRAPPERS), "")
        if wrapper:
            raise InputError(
                f"{path or 'model'} is wrapped in {wrapper}, which stages would be without; split the "
                "model itself, and for replicas of a pipeline give pipe.runtime(mesh=...) and rt.wrap(...)"
            )


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, numbers as Python's own; those of unknown names as they are.

    Raises :class:`InputError` for the first with a value it cannot have.
    """
    return {name: _CHECKS[name](name, v) if name in _CHECKS else v for name, v in options.items()}


def check_names(verb: str, options: Iterable[str], *functions: Callable[..., Any]) -> None:
    """Raise :class:`InputError` for the first option that is none of the keywords that ``functions`` take."""
    parameters = [p for f in functions for p in inspect.signature(f).parameters.values()]
    known = sorted({p.name for p in parameters if p.kind is p.KEYWORD_ONLY})
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
            raise InputError(f"{verb}() has no option {name!r}; {hint}")


def _optional(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _count(most: int) -> Check:
    """A whole number, ``"auto"`` or None."""

    def check(name: str, value: Any) -> int | str | None:
        is_free = value is None or (isinstance(value, str) and value == "auto")
        return value if is_free else whole(name, value, 1, most, also="'auto'")

    return check


def _at_least(least: int, most: int) -> Check:
    return lambda name, value: whole(name, value, least, most)


def _number(least: float, *, above: bool = False, most: float = 1e12, unit: str = "") -> Check:
    return lambda name, value: number(name, value, least, most, above=above, unit=unit)


def _a(wanted: str, *types: type[Any]) -> Check:
    def check(name: str, value: Any) -> Any:
        if not isinstance(value, types):
            raise InputError(f"{name} is {brief(value)}; it must be {wanted}")
        return value

    return check


def _balance(name: str, value: Any) -> Any:
    return value if callable(value) else one_of(name, value, ("cost", "parameters", "uniform"))


def _dims(name: str, value: Any) -> dict[str, int]:
    given = mapping(name, value, "a dict of dim to size, such as {'batch': 2}")
    return {dim: whole(f"{name}[{dim!r}]", size) for dim, size in given.items()}


def _dynamic(name: str, value: Any) -> Any:
    if not isinstance(value, bool) and not (isinstance(value, str) and value == "auto"):
        raise InputError(f"{name} is {brief(value)}; it must be True, False or 'auto'")
    return value


def _device(name: str, value: Any) -> Any:
    _a("a torch device, a Device, or the name or file of one", str, torch.device, Device)(name, value)
    if isinstance(value, Device):
        return value
    try:
        where = torch.device(value)
    except RuntimeError:
        return value  # the name or the file of a described device
    try:
        torch.empty(0, device=where)
    except Exception as error:  # whatever a backend says of a device that is not there
        raise InputError(f"{name} is {str(value)!r}, which is not on this machine: {error}") from error
    return value


def _optimizer(name: str, value: Any) -> Any:
    """A preset's name where memory is planned, a class where its step is measured."""
    return value if isinstance(value, type) else one_of(name, value, OPTIMIZERS)


_CHECKS: Mapping[str, Check] = {
    **CHECKS,
    "n_stages": _count(MOST_STAGES),
    "n_ranks": _optional(_at_least(1, MOST_STAGES)),
    "min_ranks": _at_least(1, MOST_STAGES),
    "n_microbatches": _count(MOST_MICROBATCHES),
    "schedule": word(*NAMES, "auto"),
    "balance": _balance,
    "costs": _a("'measured', 'estimated', a CostTable or the path of one", str, CostTable, pathlib.Path),
    "cluster": _optional(_a("a Cluster or the path of one", Cluster, str, pathlib.Path)),
    "device": _optional(_device),
    "time_limit_s": _optional(_number(0, most=1e9, unit="seconds")),
    "stall_limit_s": _optional(_number(0, above=True, most=1e9, unit="seconds")),
    "dynamic": _dynamic,
    "open": names,
    "closed": names,
    "store": _optional(_a("a folder's path or a Store", str, pathlib.Path, os.PathLike, Store)),
    "dims": _optional(_dims),
    "dtype": _optional(_a("a torch dtype", torch.dtype)),
    "autocast": _optional(_a("a torch dtype", torch.dtype)),
    "compiled": flag,
    "training": flag,
    "optimizer": _optimizer,
    "precision": _optional(word(*PRECISIONS)),
    "offload": word(*OFFLOADS),
    "n_peers": _at_least(0, 4096),
    "min_passes": _at_least(1, 10**6),
    "max_passes": _at_least(1, 10**6),
    "min_s": _number(0, most=1e6, unit="seconds"),
    "progress": flag,
}
