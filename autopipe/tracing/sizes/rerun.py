"""Runs a recording again, on other inputs, and reports the shapes and numbers it sees.

Choosing the inputs and fitting formulas to what is seen is left to ``dims``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import CaptureError
from ..calls.call import Call, Recording, map_calls
from ..calls.functions import tensors
from ..calls.perform import ask, run_call
from ..graphs.opgraph import Kind
from ..inputs.structure import flatten, unflatten
from ..record.branches import program

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
        run = functools.partial(run_call, model, recording.constants, call, args, kwargs, given, device)
        if device.type == "meta" and _reads(call):
            run = functools.partial(_computed, model, recording.constants, calls[:i], call, given)
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


def _reads(call: Call) -> bool:
    """Whether a call gives a number that is read out of a tensor, which on meta has none."""
    is_made = call.is_size and not call.accessor and call.op != "call_module"
    return is_made and any(isinstance(c.value, torch.Tensor) for c in call.inputs)


def _computed(
    model: nn.Module,
    constants: Mapping[str, Any],
    before: Sequence[Call],
    call: Call,
    given: Mapping[str, torch.Tensor],
) -> Any:
    """A number that sizes decide, computed on the CPU; raises where it takes more."""
    calls = program(before, call)
    if calls is None:
        raise CaptureError(f"{call.source}: a number read on the meta device depends on data")

    def run(each: Call, args: Any, kwargs: Any) -> Any:
        return run_call(model, constants, each, args, kwargs, given, torch.device("cpu"))

    return ask(calls, run)


def _alias(value: Any) -> Any:
    """A value with other tensors on the same memory, whose shapes may be changed in place."""
    leaves, spec = flatten(value)
    return unflatten(spec, [v.detach() if isinstance(v, torch.Tensor) else v for v in leaves])


def _outline(value: Any) -> tuple[Any, ...]:
    """A value without the data in its tensors."""
    leaves, spec = flatten(value)
    return spec, *((t.shape, t.stride(), t.dtype) if isinstance(t, torch.Tensor) else str(t) for t in leaves)
