"""Lays an op graph out as one row per op, values running down lanes beside them, like a commit log.

Drawing it is left to the report's script.
"""

from __future__ import annotations

import heapq

from ..graph import OpGraph

__all__ = ["lanes"]


def lanes(graph: OpGraph) -> tuple[int, ...]:
    """The lane of each op's value, in program order; no lane holds two values at once.

    A value occupies its lane from its own row to the row of its last consumer. An op takes over the lane of
    an input that ends with it where there is one, so a chain runs straight down; otherwise it takes the
    leftmost free lane. Complexity O(edges + ops · log ops).
    """
    last = {name: max(map(graph.position.__getitem__, c), default=-1) for name, c in graph.consumers.items()}
    lane: dict[str, int] = {}
    free: list[int] = []
    n_lanes = 0
    for row, op in enumerate(graph.ops):
        ending = sorted({lane[p] for p in graph.takes[op.name] if last[p] == row})
        for ended in ending[1:]:
            heapq.heappush(free, ended)
        if ending:
            lane[op.name] = ending[0]
        elif free:
            lane[op.name] = heapq.heappop(free)
        else:
            lane[op.name], n_lanes = n_lanes, n_lanes + 1
        if last[op.name] <= row:
            heapq.heappush(free, lane[op.name])
    return tuple(lane[op.name] for op in graph.ops)
