"""Runs a recording again, on other inputs, and reports the shapes and numbers it sees.

Choosing the inputs and fitting formulas to what is seen is left to ``dims``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..calls import regions
from ..calls.call import Call, Recording, map_calls
from ..calls.functions import on_one_device, tensors
from ..graphs.opgraph import Kind
from ..inputs.structure import flatten, unflatten

__all__ = ["Observation", "Sharing", "replay", "with_guards"]

Seen = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """What one run showed: per call the shapes of its tensors, or its value where that is a number."""

    shapes: Mapping[int, Seen]
    numbers: Mapping[int, Any]
    result: tuple[Any, ...]


def with_guards(recording: Recording) -> list[Call]:
    """The recording's calls, and those that only its guards use right behind what they come from."""
    have = {id(c) for c in recording.calls}
    extra: dict[int, list[Call]] = {}
    placed: dict[int, int] = {id(c): i for i, c in enumerate(recording.calls)}

    def place(call: Call) -> int:
        if id(call) not in placed:
            after = max((place(c) for c in call.inputs), default=0)
            placed[id(call)] = after
            extra.setdefault(after, []).append(call)
        return placed[id(call)]

    for guard in recording.guards:
        for operand in guard.operands:
            if isinstance(operand, Call) and id(operand) not in have:
                place(operand)
    return [c for i, call in enumerate(recording.calls) for c in (call, *extra.get(i, ()))]


class Sharing:
    """Lets leaves that give equal shapes share the value of the first of them in one run.

    What is seen is then right, and the data in the result are not, where the sharing ``is_used``. ``kind``
    tells a leaf's kind by its path.
    """

    def __init__(self, kind: Callable[[str], Kind]) -> None:
        self.kind = kind
        self.values: dict[Any, Any] = {}
        self.is_used = False

    def value(self, call: Call, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """What ``run`` gives, or a leaf of its kind has given for the same, as it did on the example."""
        kind = self.kind(call.target)
        if kind.is_hooked:
            return run()
        key = kind, call.region, _outline((args, kwargs)), _outline(call.value)
        if key not in self.values:
            self.values[key] = run()
            return self.values[key]
        self.is_used = True
        return _alias(self.values[key])


def replay(
    model: nn.Module,
    recording: Recording,
    given: Mapping[str, torch.Tensor],
    device: torch.device,
    sharing: Sharing | None = None,
    look: Callable[[Call, Any], None] | None = None,
) -> Observation:
    """Run the recording on the model's own modules; values are dropped after their last use.

    ``look`` is shown each call with its value.
    """
    calls = with_guards(recording)
    last = {id(c): i for i, call in enumerate(calls) for c in call.inputs}
    values: dict[int, Any] = {}
    shapes: dict[int, Seen] = {}
    numbers: dict[int, Any] = {}
    for i, call in enumerate(calls):
        args = map_calls(call.args, lambda c: values[id(c)])
        kwargs = map_calls(call.kwargs, lambda c: values[id(c)])
        if call.op == "output":
            return Observation(shapes, numbers, args[0])
        run = functools.partial(_run, model, recording, call, args, kwargs, given, device)
        value = sharing.value(call, args, kwargs, run) if sharing and call.op == "call_module" else run()
        shapes[id(call)] = tuple(tuple(t.shape) for t in tensors(value))
        if isinstance(value, (int, float)):
            numbers[id(call)] = value
        values[id(call)] = value
        if look is not None:
            look(call, value)
        for used in call.inputs:
            if last[id(used)] == i:
                del values[id(used)]
    raise AssertionError("a recording ends in its output")


def _run(
    model: nn.Module,
    recording: Recording,
    call: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: Mapping[str, torch.Tensor],
    device: torch.device,
) -> Any:
    if call.op == "placeholder":
        return given[call.target]
    if call.op == "get_attr":
        return lookup(model, call.target, recording.constants, device)
    if device.type == "meta":
        args, kwargs = on_one_device((args, kwargs))
    token = regions.enter(call.region) if call.region else []
    try:
        if call.op == "call_module":
            return model.get_submodule(call.target)(*args, **kwargs)
        if call.op == "call_method":
            return getattr(args[0], call.target)(*args[1:], **kwargs)
        return call.target(*args, **kwargs)
    finally:
        regions.leave(token)


def _alias(value: Any) -> Any:
    """A value with other tensors on the same memory, whose shapes may be changed in place."""
    leaves, spec = flatten(value)
    return unflatten(spec, [v.detach() if isinstance(v, torch.Tensor) else v for v in leaves])


def _outline(value: Any) -> tuple[Any, ...]:
    """A value without the data in its tensors."""
    leaves, spec = flatten(value)
    return spec, *((t.shape, t.stride(), t.dtype) if isinstance(t, torch.Tensor) else str(t) for t in leaves)


def lookup(model: nn.Module, target: str, constants: Mapping[str, Any], device: torch.device) -> Any:
    """What a ``get_attr`` target stands for."""
    if target == "_device":
        return device
    if target in constants:
        return constants[target]
    value: Any = model
    for name in target.split(".") if target else ():
        value = getattr(value, name)
    return value
