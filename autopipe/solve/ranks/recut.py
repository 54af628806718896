"""The cuts of a few consecutive stages chosen anew, exactly, while all other stages stay as they are.

Where ranks hold many stages this reaches what moves of single items do not; those are left to ``virtual``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from ..definition.problem import HUGE, Array, Problem
from ..definition.relaxed import apart
from ..lines.intervals import Rows
from ..stopping import clock_s

__all__ = ["recut"]

_MOST_CELLS = 1 << 24
"""Tables of loads have stages × items² entries."""


def recut(problem: Problem, stage_of: Sequence[int], deadline: float) -> tuple[int, ...]:
    """The assignment after every new choice of cuts that lowers the fullest rank's load.

    Every run of consecutive stages whose ranks differ is cut anew in turn, over the items in the order of
    their stages, until none helps. O(runs · items in them² · stages) each time round.
    """
    order = sorted(range(len(stage_of)), key=lambda v: (stage_of[v], v))
    best, value = tuple(stage_of), problem.bottleneck(problem.loads(stage_of))
    if problem.n_stages * (len(order) + 1) ** 2 > _MOST_CELLS:
        return best
    table = _table(problem, order)
    improved = True
    while improved:
        improved = False
        for run in _runs(problem):
            if clock_s() > deadline:
                return best
            found = _cut(problem, table, order, best, run)
            after = HUGE if found is None else problem.bottleneck(problem.loads(found))
            if found is not None and after < value:
                best, value, improved = found, after, True
    return best


def _runs(problem: Problem) -> Iterator[range]:
    """The longest runs of stages on different ranks, from each stage on."""
    k = problem.n_stages
    for first in range(k - 1):
        seen: set[int] = set()
        end = first
        while end < k and problem.stages[end].rank not in seen:
            seen.add(problem.stages[end].rank)
            end += 1
        if end - first > 1:
            yield range(first, end)


def _table(problem: Problem, order: Sequence[int]) -> Array:
    """[stage, start, end] → load of the items from start to end in the order, on a rank of its own."""
    n = len(order)
    free = "never" if problem.recompute == "auto" else problem.recompute
    own = dataclasses.replace(apart(problem, limited=False), recompute=free)
    out = np.full((problem.n_stages, n + 1, n + 1), HUGE, dtype=np.int64)
    for i, stages, ends, loads in Rows(own, order).descend(HUGE):
        out[stages, i, ends] = loads
    return out


def _cut(
    problem: Problem, table: Array, order: Sequence[int], stage_of: Sequence[int], run: range
) -> tuple[int, ...] | None:
    """The least bottleneck over the cuts between the stages of a run; None where no choice is allowed."""
    places = [x for x, v in enumerate(order) if stage_of[v] in run]
    if not places:
        return None
    low, high = places[0], places[-1] + 1
    loads = problem.loads(stage_of)
    base = [
        sum(loads[s].load_ns for s in problem.stages_of[problem.stages[x].rank] if s not in run) for x in run
    ]
    rest = np.full(high - low + 1, HUGE, dtype=np.int64)
    rest[-1] = 0
    choices = []
    for x, s in reversed(list(enumerate(run))):
        totals = np.maximum(table[s, low : high + 1, low : high + 1] + base[x], rest[None, :])
        choices.append(totals.argmin(axis=1))
        rest = totals.min(axis=1)
    if rest[0] >= HUGE:
        return None
    out, at = list(stage_of), 0
    for s, choice in zip(run, reversed(choices), strict=True):
        end = int(choice[at])
        for x in range(low + at, low + end):
            out[order[x]] = s
        at = end
    return tuple(out)
