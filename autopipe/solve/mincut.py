"""A bound from single items: the least that any stage holding a given item costs, by minimum cut.

``min over S ∋ v of work(S) + transfers(S)`` over every set of items, in whatever order: a relaxation of one
stage that keeps all of its own prices. Bounds from totals are left to ``bounds``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from .problem import Problem, scaled

__all__ = ["dearest_item"]

_LARGEST = 1 << 29
"""Capacities are rounded down to this many steps: scipy's flows are 32-bit."""


def dearest_item(problem: Problem, enough: int, deadline: float, tries: int = 12) -> int:
    """The largest bound over the items most likely to give one; stops early at ``enough``.

    One maximum flow (Dinic, scipy) per item looked at, on items + 2 · nets nodes. Prices must add up, so
    problems that hide transfers behind work get 0.
    """
    if problem.overlap or not problem.items:
        return 0
    sizes = [i.work_ns for i in problem.items]
    for net in problem.nets:
        sizes[net.producer] += net.send_ns
        for v in net.consumers:
            sizes[v] += net.receive_ns
    likely = sorted(range(len(sizes)), key=lambda v: -sizes[v])[:tries]
    network = _Network(problem, enough)
    best = 0
    for v in likely:
        if sizes[v] <= best:
            continue
        best = max(best, network.bound(v))
        if best >= enough or time.perf_counter() > deadline:
            break
    return best


class _Network:
    """Items inside the source's side are the stage; nets and shares are gadgets of one or two nodes."""

    def __init__(self, problem: Problem, enough: int) -> None:
        self.step = max(1, math.ceil(enough / _LARGEST))
        self.unbounded = (1 << 30) - 1
        self.size = len(problem.items) + 2 * len(problem.nets) + 2
        self.sink = self.size - 1
        fastest = max(s.speed for s in problem.stages)
        rows: list[tuple[int, int, int]] = [
            (v, self.sink, self._units(scaled(i.work_ns, fastest))) for v, i in enumerate(problem.items)
        ]
        node = len(problem.items)
        for net in problem.nets:
            rows.append((net.producer, node, self._units(net.send_ns)))
            rows.append((node + 1, net.producer, self._units(net.receive_ns)))
            for v in net.consumers:
                rows.append((node, v, self.unbounded))
                rows.append((v, node + 1, self.unbounded))
            node += 2
        self.rows = [row for row in rows if row[2]]

    def _units(self, ns: int) -> int:
        return min(ns // self.step, self.unbounded)

    def bound(self, v: int) -> int:
        """The least cost of a stage that holds ``v``."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import maximum_flow

        rows: Sequence[tuple[int, int, int]] = [*self.rows, (self.sink - 1, v, self.unbounded)]
        source, target, capacity = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
        network = csr_array((capacity, (source, target)), shape=(self.size, self.size))
        return int(maximum_flow(network, self.sink - 1, self.sink).flow_value) * self.step
