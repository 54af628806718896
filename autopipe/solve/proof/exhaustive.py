"""The optimum by looking at every assignment: the oracle that tests hold the solver against.

Only for a handful of items; the solver itself is ``chains``.
"""

from __future__ import annotations

import itertools

from ..definition.problem import HUGE, Problem

__all__ = ["exhaustive"]


def exhaustive(problem: Problem) -> tuple[int, tuple[int, ...]] | None:
    """The least bottleneck and its first assignment; None where nothing fits. O(stages ** items)."""
    best: tuple[int, tuple[int, ...]] | None = None
    stages = [range(i.first, problem.last_of(v) + 1) for v, i in enumerate(problem.items)]
    for stage_of in itertools.product(*stages):
        if problem.is_valid(stage_of):
            value = problem.bottleneck(problem.loads(stage_of))
            if value < HUGE and (best is None or value < best[0]):
                best = value, stage_of
    return best
