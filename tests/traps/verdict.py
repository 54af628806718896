"""Holds a trap's pipe against a twin of the model that nobody captured, call by call, on data of its own.

The models are left to ``registry``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import random
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from zoo.cut import uniform_plan
from zoo.observe import Observation, beside, difference, leaves
from zoo.observe import seed as seed_all

from autopipe.errors import AutopipeError
from autopipe.hardware import Cluster
from autopipe.stages import build
from autopipe.stages.verify import run_stages
from autopipe.tracing import Capture, capture
from autopipe.tracing.calls.named import Named
from autopipe.tracing.inputs.layout import copied

from .registry import Trap

__all__ = ["verdict"]

EXAMPLE, BATCH, LENGTH, BOTH, SINGLE = (2, 6), (3, 6), (2, 9), (3, 9), (1, 6)
SIZES = {False: (EXAMPLE, EXAMPLE, BATCH, LENGTH, SINGLE), True: (EXAMPLE, BOTH, EXAMPLE)}
LATE = {False: (EXAMPLE, BOTH), True: (EXAMPLE, EXAMPLE, BOTH)}
"""(batch, length) of the calls in each mode, and of later ones; inputs of every second one take gradients."""
_INTERNAL = re.compile(
    r"_constant\d|no set of leaves|"
    r"Tracked|KeyError|NoneType|GradTrackingTensor|BatchedTensor|Suspect|Restart|fx\.|Proxy|autopipe/tracing"
)


def verdict(trap: Trap) -> tuple[str, str]:
    """(``right``, ``refused``, ``silent`` or ``raw``, what was seen)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _verdict(trap)
        except AutopipeError as error:
            said = str(error)
            found = _INTERNAL.search(said)
            return ("raw", f"speaks of {found.group()}: {said}") if found else ("refused", said)


class _Differs(Exception):
    """The pipe is not the model."""


def _verdict(trap: Trap) -> tuple[str, str]:
    twin, model = _built(trap), _built(trap)
    before = _state(model)
    try:
        with trap.within():
            found = capture(model, *_given(trap, EXAMPLE, 0))
        stages = build(found, uniform_plan(found.ops, 4, Cluster.uniform(4)))
        if said := _not_called(found):
            return "silent", f"the generated code of the whole graph calls another function than {said}"
    except AutopipeError:
        if said := _changed(before, _state(model)):
            return "silent", f"a refused capture changed {said}"
        raise
    except Exception as error:
        return "raw", f"capture: {type(error).__name__}: {error}"
    if said := _changed(before, _state(model)):
        return "silent", f"the capture changed {said}"

    def pipe(*args: Any, **kwargs: Any) -> Any:
        given = run_stages(found, stages, args, kwargs)
        return found.kind_of(args, kwargs)[0].answer(given, args, kwargs)

    try:
        placed = frozenset(n for s in stages for n, _ in s.named_parameters(remove_duplicate=False))
        refused = _calls(trap, twin, model, pipe, placed, contextlib.nullcontext, told=found.left)
        if trap.later is not None:
            trap.later(twin)
            trap.later(model)
        if trap.later is not None or trap.around is not contextlib.nullcontext:
            refused += _calls(trap, twin, model, pipe, placed, trap.around, late=True, told=found.left)
    except _Differs as error:
        return "silent", str(error)
    except AutopipeError:
        raise
    except Exception as error:
        return "raw", f"call: {type(error).__name__}: {error}"
    return "right", f"{len(stages)} stages; {'; '.join(refused)}"


def _not_called(found: Capture) -> str:
    """A function of ours that a graph calls, where its code calls an equal one; empty without."""
    for form in {id(f): f for forms in found.forms.values() for f in forms}.values():
        known = form.graph.python_code("self").globals.values()
        wanted = (n.target for n in form.graph.nodes if isinstance(n.target, Named))
        for target in wanted:
            is_function = type(target) is Named
            alike = (k for k in known if type(k) is Named and is_function and k.function is target.function)
            if not any(k is target for k in known) and not any(alike):
                return target.shown
    return ""


def _built(trap: Trap) -> nn.Module:
    seed_all()
    return trap.build()


def _calls(
    trap: Trap,
    twin: nn.Module,
    model: nn.Module,
    pipe: Callable[..., Any],
    placed: frozenset[str],
    around: Any,
    late: bool = False,
    told: Collection[str] = (),
) -> list[str]:
    """The same calls of both; refusals of other sizes are returned. Parameters ``placed`` have a stage.

    Buffers that users are ``told`` of, which stages do not set, are not held against each other.
    """
    refused = []
    modules = {each: [*each.named_modules()] for each in (twin, model)}
    for training in (False, True):
        for each in () if late else (twin, model):
            each.train(training)
        for number, size in enumerate((LATE if late else SIZES)[training]):
            seed = 10 * (1 + training) + number
            given = _given(trap, size, seed)
            if number % 2:
                _mapped(given, lambda t: t.requires_grad_() if t.is_floating_point() else t)
            mode = f"{'training' if training else 'evaluation'}, call {number}, {size}"
            is_same = size == EXAMPLE
            try:
                with around():
                    expected = _observed(twin, twin, given, seed)
            except Exception:
                if is_same:
                    raise AssertionError(f"{mode}: the trap's own model fails") from None
                continue
            try:
                with around():
                    got = _observed(model, pipe, given, seed)
            except AutopipeError as error:
                if is_same:
                    raise
                refused.append(f"{size} refused: {error}")
                _align(twin, model)
                continue
            for name in told:
                expected[0].buffers.pop(name, None)
                got[0].buffers.pop(name, None)
            if said := difference(expected[0], got[0]):
                raise _Differs(f"{mode}: {said}")
            reached = {n for n, _ in model.named_parameters() if got[0].gradients.get(n) is not None}
            if not late and (left := sorted(reached - placed)):
                raise _Differs(f"{mode}: no stage has {', '.join(left)}, which gets gradients")
            if said := _changed(expected[1], got[1]):
                raise _Differs(f"{mode}: afterwards other {said}")
            there = {*twin.modules()}  # one that was replaced has the mode it had
            pairs = zip(modules[twin], modules[model], strict=True)
            apart = (path for (path, a), (_, b) in pairs if a in there and a.training is not b.training)
            if said := next(apart, ""):
                raise _Differs(f"{mode}: afterwards another mode of {said}")
    return refused


def _align(twin: nn.Module, model: nn.Module) -> None:
    """After a call that was refused the model has missed what it does to buffers."""
    with torch.no_grad():
        for a, b in zip(twin.buffers(), model.buffers(), strict=True):
            if a.shape == b.shape:
                b.copy_(a)


def _observed(model: nn.Module, call: Any, given: Any, seed: int) -> tuple[Observation, dict[str, Any]]:
    copies: dict[int, Tensor] = {}
    args, kwargs = _mapped(given, lambda t: copies.setdefault(id(t), _copy(t)))
    inputs = list(copies.values())
    model.zero_grad(set_to_none=True)
    seed_all(seed)
    result = call(*args, **kwargs)
    outputs = dict(leaves(result))
    roots = [t for t in outputs.values() if t.requires_grad]
    weights = [torch.linspace(0.5, 1.5, t.numel()).view(t.shape).to(t.dtype) for t in roots]
    if roots:
        torch.autograd.backward(roots, weights)
    grads: dict[str, Tensor | None] = {n: p.grad for n, p in model.named_parameters()}
    grads |= {f"input {i}": a.grad for i, a in enumerate(inputs)}
    held = {n: b.detach().to_dense().clone() for n, b in model.named_buffers()}
    model.zero_grad(set_to_none=True)
    outputs = {p: t.detach() for p, t in outputs.items()}
    told: dict[str, Any] = {f"argument {i}": a.detach() for i, a in enumerate(inputs)}
    told["the arguments"] = _told((args, kwargs), 0)
    told |= {f"what is in the arguments at {p}": t.detach() for p, t in leaves((args, kwargs))}
    return Observation(outputs, grads, held), {**_generators(), **told, "what is returned": _told(result, 0)}


def _given(trap: Trap, size: tuple[int, int], seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and keywords of a call."""
    given = trap.inputs(*size, seed)
    return ((), given) if isinstance(given, dict) else (given, {})


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(v, change) for v in value)
    if type(value) is dict:
        return {k: _mapped(v, change) for k, v in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{k: _mapped(v, change) for k, v in vars(value).items()})
    if any(isinstance(v, (Tensor, dict)) for v in getattr(value, "__dict__", {}).values()):
        made = copy.copy(value)
        vars(made).update(_mapped(vars(value), change))
        return made
    return value


def _copy(tensor: Tensor) -> Tensor:
    return copied(tensor).requires_grad_(tensor.requires_grad)


def _told(value: Any, depth: int) -> Any:
    """What a result is beside the numbers in its tensors: structure, names, texts, what takes gradients."""
    if isinstance(value, Tensor):
        return f"a tensor, {'with' if value.requires_grad else 'without'} gradient"
    if isinstance(value, float):
        return f"{value:.4g}"
    name, inner = type(value).__name__, None
    if isinstance(value, Mapping):
        inner = value
    elif isinstance(value, (tuple, list)):
        inner = dict(enumerate(value))
    elif hasattr(value, "__dataclass_fields__"):
        inner = {k: getattr(value, k) for k in value.__dataclass_fields__}
    elif hasattr(value, "__dict__") and not callable(value) and not isinstance(value, enum.Enum):
        inner = vars(value)
    if inner is None or depth > 6:
        return name if callable(value) or depth > 6 else f"{name} {value}"
    if getattr(value, "__dict__", None) is value:
        name = f"{name} of attributes"
    return [name, *((str(k), _told(v, depth + 1)) for k, v in {**inner, **beside(value)}.items())]


def _generators() -> dict[str, Any]:
    return {
        "torch's generator": torch.get_rng_state().numpy().tobytes(),
        "numpy's generator": _numpy_state(),
        "Python's generator": hash(random.getstate()),
    }


def _numpy_state() -> tuple[Any, ...]:
    name, words, *more = np.random.get_state()
    return (name, words.tobytes(), *more)


def _state(model: nn.Module) -> dict[str, Any]:
    """Everything that a capture must leave as it was."""
    out = _generators()
    for name, tensor in model.named_parameters():
        if nn.parameter.is_lazy(tensor):
            continue
        out[f"parameter {name}"] = (id(tensor), tensor.detach().clone(), tensor.requires_grad, tensor.grad)
    for path, module in model.named_modules():
        out[f"mode of {path}"] = module.training
        for key, value in vars(module).items():
            out[f"{path}.{key}"] = _content(value, 0)
    return out


def _content(value: Any, depth: int) -> Any:
    if nn.parameter.is_lazy(value):
        return id(value)
    if isinstance(value, Tensor):
        return (id(value), value.detach().clone(), value.dtype)
    if isinstance(value, (random.Random, np.random.RandomState)):
        return str(value.getstate() if isinstance(value, random.Random) else value.get_state())
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, nn.Module) or depth > 4:
        return id(value)
    if isinstance(value, dict):
        return {k: _content(v, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_content(v, depth + 1) for v in value]
    if hasattr(value, "__next__"):
        return repr(value)
    if hasattr(value, "__dict__") and not callable(value):
        return {k: _content(v, depth + 1) for k, v in vars(value).items()}
    return value if isinstance(value, (int, float, str, bool, type(None))) else id(value)


def _changed(before: Any, after: Any) -> str:
    """What is not as it was, by name."""
    for name in [*before, *(k for k in after if k not in before)]:
        if name not in after or name not in before or not _same(before[name], after[name]):
            return name
    return ""


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and _equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)):
        return isinstance(b, (tuple, list)) and len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.is_nested:
        return b.is_nested and _same(a.unbind(), b.unbind())
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return (
        a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b) or (a.isnan() & b.isnan()).all())
    )


def each(names: dict[str, Trap]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Every trap's verdict."""
    for name, trap in names.items():
        yield name, verdict(trap)
