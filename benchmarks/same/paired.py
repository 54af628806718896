"""Plain model and pipe in one process, their steps interleaved.

The attention calls that each makes are recorded by ``calls``; several ranks are left to ``ranks``.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn

import autopipe
from autopipe.units import size_at

from .calls import Call, attention_calls
from .models import CASES

__all__ = ["crossing_masks", "paired"]


def paired(name: str, mask: str, *, length: int, width: int, n_pairs: int) -> dict[str, Any]:
    """Whether both make the same attention calls, masks that cross for nothing, and ratios of paired steps.

    Who goes first changes from pair to pair; the first pair warms up and is not counted.
    """
    torch.manual_seed(0)
    case = CASES[name]
    model, given = case.make(width, 4), case.batch(2, length, mask)
    pipe = autopipe.split(model, 2, kwargs=given)
    # a model may set itself up at its first call (a problem type by its labels), and is then recorded anew
    model(**given)
    pipe(**given)
    with attention_calls() as plain:
        model(**given)
    with attention_calls() as ours:
        pipe(**given)
    ratios = [_ratio(pipe, model, given, pipe_first=bool(n % 2)) for n in range(n_pairs + 1)][1:]
    return {
        "equal_calls": plain == ours,
        "attention_calls": len(plain),
        "masks_crossing": crossing_masks(pipe, plain),
        "ratios": ratios,
        "ratio": statistics.median(ratios),
    }


def crossing_masks(pipe: autopipe.Pipe, calls: list[Call]) -> int:
    """Values that stages send whose last two dims are those of scores that no call of the model masks."""
    masked = {call.scores for call in calls if call.mask is not None}
    without = {call.scores for call in calls} - masked
    graph = pipe.graph.ops
    crossing = [spec for b in pipe.plan.boundaries for spec in graph.by_name[b.value].outputs]
    shapes = [tuple(size_at(size, graph.example_dims) for size in spec.shape) for spec in crossing]
    return sum(len(shape) > 2 and shape[-2:] in without for shape in shapes)


def _ratio(pipe: nn.Module, model: nn.Module, given: dict[str, Any], *, pipe_first: bool) -> float:
    seconds = {}
    for run in (pipe, model) if pipe_first else (model, pipe):
        model.zero_grad(set_to_none=True)
        start_s = time.perf_counter()
        run(**given).loss.backward()
        seconds[run] = time.perf_counter() - start_s
    return seconds[pipe] / seconds[model]
