"""The optimum by looking at every assignment: what tests and the fuzz hold the solver against.

Only for a handful of items.
"""

from __future__ import annotations

from autopipe.solve.definition.problem import HUGE, Problem

__all__ = ["exhaustive", "ordered"]


def exhaustive(problem: Problem) -> tuple[int, tuple[int, ...]] | None:
    """The least bottleneck and its first assignment; None where nothing fits. O(stages ** items)."""
    best: tuple[int, tuple[int, ...]] | None = None
    for stage_of in filter(problem.is_valid, ordered(problem)):
        value = problem.bottleneck(problem.loads(stage_of))
        if value < HUGE and (best is None or value < best[0]):
            best = value, stage_of
    return best


def ordered(problem: Problem) -> list[tuple[int, ...]]:
    """Every assignment within the items' windows that decreases along no edge, one item after another."""
    rows: list[tuple[int, ...]] = [()]
    for v, item in enumerate(problem.items):
        before, after = ([u for u in beside[v] if u < v] for beside in (problem.before, problem.after))
        rows = [
            (*row, s)
            for row in rows
            for s in range(item.first, problem.last_of(v) + 1)
            if all(row[u] <= s for u in before) and all(s <= row[u] for u in after)
        ]
    return rows
