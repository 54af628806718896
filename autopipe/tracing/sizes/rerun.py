"""Runs a recording again, on other inputs, and reports the shapes and numbers it sees.

Choosing the inputs and fitting formulas to what is seen is left to ``dims``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import CaptureError
from ..calls.call import Call, Recording
from ..calls.functions import plain_name, tensors
from ..calls.perform import ask, run_call, way_to
from ..calls.places import Places
from ..calls.sharing import Sharing, outline
from ..code.leaves import asking
from ..state.example_data import without_graphs
from ..values.branches import program

__all__ = ["Observation", "buffers_written", "replay", "with_guards"]

Seen = tuple[tuple[int, ...], ...]
Noted = tuple[dict[int, Seen], dict[int, Any]]
"""By id of a call, the shapes of its tensors, and its value where that is a number."""

_UNSET = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """What one run showed: per call the shapes of its tensors, or its value where that is a number.

    ``left`` are the buffers that it wrote, as it left them, where whoever ran it has looked at them.
    """

    shapes: Mapping[int, Seen]
    numbers: Mapping[int, Any]
    result: tuple[Any, ...]
    left: tuple[torch.Tensor, ...] = ()


def buffers_written(model: nn.Module, forms: Sequence[Recording]) -> tuple[str, ...]:
    """The buffers that any form writes, by name."""
    buffers, found = dict(model.named_buffers(remove_duplicate=False)), dict[str, None]()
    for form in forms:
        touched = frozenset[int]().union(*(c.writes for c in form.calls))
        for call in form.calls:
            found.update(dict.fromkeys(call.mutated))
            if call.op == "get_attr" and call.storages & touched:
                found[str(call.target)] = None
    return tuple(name for name in found if name in buffers)


def with_guards(recording: Recording) -> list[Call]:
    """The recording's calls, inputs first, and those that only its guards use behind what they come from."""
    have = {id(c) for c in recording.calls}
    first = sum(c.op == "placeholder" for c in recording.calls) - 1
    extra: dict[int, list[Call]] = {}
    placed: dict[int, int] = {id(c): i for i, c in enumerate(recording.calls)}

    def place(call: Call) -> int:
        if id(call) not in placed:
            after = max((first, *map(place, call.inputs)))
            placed[id(call)] = after
            extra.setdefault(after, []).append(call)
        return placed[id(call)]

    for guard in recording.guards:
        for operand in guard.operands:
            if isinstance(operand, Call) and id(operand) not in have:
                place(operand)
    return [c for i, call in enumerate(recording.calls) for c in (call, *extra.get(i, ()))]


class _Program:
    """The order in which calls run again, what takes their arguments, and whose values they use last."""

    def __init__(self, model: nn.Module, recording: Recording) -> None:
        self.model = model
        self.made_of = recording.calls, [*recording.calls], recording.guards, [*recording.guards]
        self.calls = with_guards(recording)
        self.inputs = [c.inputs for c in self.calls]
        places = Places(self.calls)
        last = {places.of(c): i for i, given in enumerate(self.inputs) for c in given}
        dropped: list[list[int]] = [[] for _ in self.calls]
        for used, i in last.items():
            dropped[i].append(used)
        takes = [
            (places.taking(c.args), tuple(c.kwargs), places.taking([*c.kwargs.values()])) for c in self.calls
        ]
        unset = map(_is_unset, self.calls)
        ways = [way_to(model, c.target) if c.op == "call_module" else None for c in self.calls]
        self.steps = [*zip(itertools.count(), self.calls, takes, ways, unset, dropped, strict=False)]
        self.values = [*[None] * len(self.calls), *places.constants]

    def __reduce__(self) -> tuple[Any, ...]:
        """Nothing: copies of a recording, and those from a file, make one of their own calls."""
        return type(None), ()

    def is_of(self, model: nn.Module, recording: Recording) -> bool:
        """Whether the recording is as it was: calls are taken out, and take other arguments."""
        calls, all_calls, guards, all_guards = self.made_of
        is_same = model is self.model and recording.calls is calls and recording.guards is guards
        is_same = is_same and calls == all_calls and len(guards) == len(all_guards)
        return is_same and all(c.inputs is given for c, given in zip(self.calls, self.inputs, strict=True))


def _program(model: nn.Module, recording: Recording) -> _Program:
    if recording.program is None or not recording.program.is_of(model, recording):
        recording.program = _Program(model, recording)
    found: _Program = recording.program
    return found


def replay(
    model: nn.Module,
    recording: Recording,
    given: Mapping[str, torch.Tensor],
    device: torch.device,
    sharing: Sharing | None = None,
    look: Callable[[Call, Any], Any] | None = None,
    into: Noted | None = None,
    *,
    notes: bool = True,
) -> Observation:
    """Run the recording on the model's own modules; values are dropped after their last use.

    ``look`` is shown each call with its value; what it gives, if anything, takes the value's place. One that
    takes derivatives runs with gradients enabled, others as the caller has it; results have none where the
    caller has none, which would keep all that was computed on the way. Shapes and numbers go ``into``
    those that are given, or new ones, as they are seen; they are left out if not to be in the ``notes``.
    """
    noted, has_gradients = into or ({}, {}), torch.is_grad_enabled()
    with asking(), torch.enable_grad() if recording.takes_grad_mode else contextlib.nullcontext():
        result = _replay(model, recording, given, device, sharing, look, noted if notes else None)
    return Observation(*noted, result if has_gradients else tuple(without_graphs(result)))


def _replay(
    model: nn.Module,
    recording: Recording,
    given: Mapping[str, torch.Tensor],
    device: torch.device,
    sharing: Sharing | None,
    look: Callable[[Call, Any], Any] | None,
    noted: Noted | None,
) -> tuple[Any, ...]:
    program = _program(model, recording)
    values: list[Any] = [*program.values]
    constants, is_meta = recording.constants, device.type == "meta"
    for i, call, (take, names, take_named), way, is_unset, dropped in program.steps:
        args = take(values)
        kwargs = dict(zip(names, take_named(values), strict=True)) if names else {}
        if call.op == "output":
            result: tuple[Any, ...] = args[0]
            return result
        if is_meta and _reads(call):
            value = _computed(model, constants, program.calls[:i], call, given)
        elif sharing and call.op == "call_module":
            run = functools.partial(run_call, model, constants, call, args, kwargs, given, device, way)
            value = sharing.value(call.target, call.region, args, kwargs, outline(call.value), run)
        else:
            value = run_call(model, constants, call, args, kwargs, given, device, way)
        if is_unset:
            with torch.no_grad():
                value.zero_()  # what memory held before differs from run to run, and means nothing
        if noted is not None:
            _note(noted, call, value)
        if look is not None and (other := look(call, value)) is not None:
            value = other
        values[i] = value
        for place in dropped:
            values[place] = None
    raise AssertionError("a recording ends in its output")


def _note(noted: Noted, call: Call, value: Any) -> None:
    shapes, numbers = noted
    if isinstance(value, torch.Tensor):
        shapes[id(call)] = (value.shape,)
        return
    shapes[id(call)] = tuple(tuple(t.shape) for t in tensors(value))
    if isinstance(value, (int, float)):
        numbers[id(call)] = value


def _is_unset(call: Call) -> bool:
    """Whether a call makes a tensor whose content is for others to write."""
    return call.op in ("call_function", "call_method") and plain_name(call) in _UNSET


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
