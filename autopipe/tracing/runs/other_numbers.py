"""Inputs for which a number in them, that the model's Python goes by, is another: the task, the expert.

Recording the model on them is left to ``session``; masks and labels to ``other_masks``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..calls.call import Call, Recording
from ..calls.faults import of_models
from ..calls.perform import ask, run_call

__all__ = ["otherwise"]

_MOST = 8
"""How many whole numbers are tried, from zero."""


def otherwise(
    model: nn.Module, known: Recording, place: int, given: Mapping[str, Tensor], device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """The inputs with one of them filled with another number, one for each further answer to a read.

    That is the read of the recording at ``place``; those before it come out as they have.
    """
    branches = known.branches[: place + 1]
    before = [b.outcome for b in branches]
    met = {before.pop()}

    def answers(tensors: Mapping[str, Tensor]) -> list[object]:
        def run(call: Call, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            return run_call(model, known.constants, call, args, kwargs, tensors, device)

        return [ask(b.calls, run) for b in branches]

    for tensors in _filled(branches[-1].calls, given):
        try:
            with torch.no_grad():
                *others, answer = answers(tensors)
        except of_models():  # whatever it is: these numbers are not what the model asks for
            continue
        if others == before and answer not in met:
            met.add(answer)
            yield tensors


def _filled(calls: Sequence[Call], given: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The inputs with one of those that are asked about filled with a number near what they are held to."""
    held_to = {v for c in calls for v in c.args if isinstance(v, (int, float))}
    near = sorted({v + d for v in held_to for d in (-1, 0, 1)})
    for name in dict.fromkeys(str(c.target) for c in calls if c.op == "placeholder"):
        tensor = given[name]
        if tensor.is_complex() or not tensor.numel():
            continue
        if tensor.is_floating_point():
            numbers = [v for v in near if abs(v) <= torch.finfo(tensor.dtype).max]
        else:
            most = 1 if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max
            numbers = [v for v in dict.fromkeys((*near, *range(_MOST))) if 0 <= v <= most and v == int(v)]
        for number in numbers:
            other = torch.full_like(tensor, number)
            yield {**given, name: other.requires_grad_(tensor.requires_grad)}
