"""Whether a recording made in training also holds in evaluation, as far as code that stays whole decides it.

Whether the code around it goes by the mode is noted by ``reads``; what follows is left to ``runs``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..calls.call import Call, Recording, map_calls
from ..calls.faults import of_models
from ..calls.functions import Versions
from ..calls.perform import run_call
from ..calls.sharing import Twins
from ..inputs.contents import SIMPLE
from ..inputs.structure import flatten, marks
from ..members import modules_in, submodule
from ..state.state import generators

__all__ = ["Evaluation", "are_recorded_alike", "evaluated"]


class Evaluation:
    """A run in evaluation, which begins now, of what was recorded in training: whether it does the same.

    No call may give anything but what it is recorded to give: values of one structure, tensors of the same
    shape, strides and kind that take gradients or not, equal numbers. None draws or writes to ``weights``.
    """

    def __init__(self, weights: Sequence[torch.Tensor], device: torch.device) -> None:
        self._held, self._device = Versions.of(dict(enumerate(weights))), device
        self._drawn = generators(device)
        self.is_as_recorded = True
        """So far, but for draws and writes, which are told at the end."""

    def look(self, call: Call, value: Any) -> None:
        """A call gave a value."""
        self.is_as_recorded = self.is_as_recorded and _is_as_recorded(call, value)

    def end(self) -> None:
        """The last call has been made."""
        is_left = not self._held.written() and generators(self._device) == self._drawn
        self.is_as_recorded = self.is_as_recorded and is_left


def evaluated(
    model: nn.Module,
    weights: Sequence[torch.Tensor],
    recording: Recording,
    given: Mapping[str, torch.Tensor],
    device: torch.device,
    twins: Twins | None,
) -> Sequence[Any] | None:
    """The leaves of what a recording gives in the mode that the model, which has the ``weights``, is in now.

    None where a call fails, or the run is no :class:`Evaluation`. Leaves that are ``twins`` run once.
    """
    seen = Evaluation(weights, device)
    values: dict[int, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model said what it had to say when it was recorded
        for call in recording.calls:
            args, kwargs = (map_calls(a, lambda c: values[id(c)]) for a in (call.args, call.kwargs))
            if call.op == "output":
                break
            try:
                run = functools.partial(
                    run_call, model, recording.constants, call, args, kwargs, given, device
                )
                value = _shared(model, call, args, kwargs, twins, run) if twins else run()
            except of_models():  # whatever it is: then it is not as recorded
                return None
            seen.look(call, value)
            if not seen.is_as_recorded:
                return None
            values[id(call)] = value
    seen.end()
    if not seen.is_as_recorded:
        return None
    return [v.detach() if isinstance(v, torch.Tensor) else v for v in args[0]]


def are_recorded_alike(training: Recording, evaluation: Recording) -> bool:
    """Whether the calls of a recording in evaluation give what those in training do, and do nothing else.

    They are the same calls, one by one; see :class:`Evaluation`.
    """
    calls = evaluation.calls
    does_more = any(c.is_random or c.leaves_more for c in calls)
    pairs = zip(training.calls, calls, strict=False)
    return (
        not does_more
        and len(training.calls) == len(calls)
        and all(a.target == b.target and _is_as_recorded(a, b.value) for a, b in pairs if a.op != "output")
    )


def _shared(
    model: nn.Module, call: Call, args: Any, kwargs: Any, twins: Twins, run: Callable[[], Any]
) -> Any:
    """What a call gives, or what a leaf that is alike has given."""
    if call.op != "call_module":
        return run()
    inside = [m for _, m in modules_in(submodule(model, call.target))]
    key = twins.key(call.target, inside, call.region, (args, kwargs))
    if (copied := twins.copy(key)) is not None:
        return copied()
    value = run()
    if key is not None:
        twins.keep(key, call, value, (args, kwargs))
    return value


def _is_as_recorded(call: Call, value: Any) -> bool:
    """Whether code that goes by all but data cannot tell a value from the recorded one."""
    if isinstance(value, torch.Tensor):
        return _is_alike(call.value, value)
    (known, known_spec), (now, spec) = flatten(call.value), flatten(value)
    return known_spec == spec and all(map(_is_alike, known, now))


def _is_alike(known: Any, now: Any) -> bool:
    if isinstance(known, torch.Tensor):
        return isinstance(now, torch.Tensor) and _kind(known) == _kind(now) and not marks(now)
    is_plain = isinstance(now, SIMPLE) and type(known) is type(now)
    return known is now or (is_plain and bool(known == now))


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    layout = tensor.layout
    steps = tensor.stride() if layout is torch.strided else ()
    return tensor.shape, steps, tensor.dtype, tensor.requires_grad, layout
