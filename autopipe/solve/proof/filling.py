"""Whether every stage can have an item of its own, as far as pins and order tell.

What stages then cost and whether they fit is left to the other proofs.
"""

from __future__ import annotations

import heapq

from ..definition.problem import Problem

__all__ = ["can_fill", "windows"]


def windows(problem: Problem) -> list[tuple[int, int]]:
    """The first and last stage of each item: none before what it follows, none after what follows it."""
    first = [i.first for i in problem.items]
    last = [problem.last_of(v) for v in range(len(first))]
    edges = sorted(problem.edges)
    for a, b in edges:
        first[b] = max(first[b], first[a])
    for a, b in reversed(edges):
        last[a] = min(last[a], last[b])
    return list(zip(first, last, strict=True))


def can_fill(problem: Problem) -> bool:
    """False where some item has no stage, or stages that may not be empty outnumber the items for them.

    Stage by stage, of the items that may be there, the one that must be placed soonest: a matching of
    intervals is complete so where any is. O(items × log items).
    """
    spans = windows(problem)
    if any(last < first for first, last in spans):
        return False
    if problem.allow_empty:
        return True
    waiting = sorted(
        (span for span, item in zip(spans, problem.items, strict=True) if item.ops), reverse=True
    )
    soonest: list[int] = []
    for s in range(problem.n_stages):
        while waiting and waiting[-1][0] <= s:
            heapq.heappush(soonest, waiting.pop()[1])
        while soonest and soonest[0] < s:
            heapq.heappop(soonest)
        if not soonest:
            return False
        heapq.heappop(soonest)
    return True
