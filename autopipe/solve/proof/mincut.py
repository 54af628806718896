"""A bound from single items: the least that any stage holding a given item costs, by minimum cut.

``min over S ∋ v of work(S) + transfers(S)`` over every set of items in which what lies between ``v`` and
another of its items lies too: a relaxation of one stage that keeps all of its own prices. Bounds from totals
are left to ``bounds``.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..definition.problem import HUGE, Problem
from ..stopping import clock_s

__all__ = ["dearest_item"]

_MEAN = 4
"""Means of work and transfers are taken in quarters."""
_LARGEST = 1 << 29
"""Capacities are first rounded down to this many steps: scipy's flows are 32-bit."""


def dearest_item(problem: Problem, enough: int, deadline: float, tries: int = 12) -> int:
    """The largest bound over the items most likely to give one; stops early at ``enough``.

    One maximum flow (Dinic, scipy) per item looked at, on items + 2 · nets nodes. Where transfers hide behind
    work, the larger of the two is at least any mean of both: a few are tried.
    """
    if not problem.items:
        return 0
    if problem.overlap:
        means = (_mean(problem, work, _MEAN - work) for work in range(1, _MEAN))
        rounding = _MEAN if any(s.speed != 1.0 for s in problem.stages) else 0
        bounds = [dearest_item(p, enough * _MEAN, deadline, tries // 2) - rounding for p in means]
        return max(0, -(-max(bounds) // _MEAN))
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
        if best >= enough or clock_s() > deadline:
            break
    return best


def _mean(problem: Problem, work: int, transfers: int) -> Problem:
    """The problem whose loads are so many times the work and the transfers together."""
    times = [(i.forward_ns * work, i.backward_ns * work) for i in problem.items]
    return dataclasses.replace(
        problem,
        items=tuple(
            dataclasses.replace(i, forward_ns=f, backward_ns=b)
            for i, (f, b) in zip(problem.items, times, strict=True)
        ),
        nets=tuple(
            dataclasses.replace(n, send_ns=n.send_ns * transfers, receive_ns=n.receive_ns * transfers)
            for n in problem.nets
        ),
        overlap=False,
    )


class _Network:
    """Items inside the source's side are the stage; nets and shares are gadgets of one or two nodes."""

    def __init__(self, problem: Problem, enough: int) -> None:
        self.problem, self.enough = problem, enough
        self.step = max(1, math.ceil(enough / _LARGEST))
        self.size = len(problem.items) + 2 * len(problem.nets) + 2
        self.source, self.sink = self.size - 2, self.size - 1
        fastest = max(s.speed for s in problem.stages)
        # a stage rounds forward and backward apart: together they may be one less than their exact sum
        self.rounding = int(fastest != 1.0)
        works = [math.floor(i.work_ns / fastest) for i in problem.items]
        rows = [(v, self.sink, work) for v, work in enumerate(works)]
        node = len(problem.items)
        for net in problem.nets:
            rows.append((net.producer, node, net.send_ns))
            rows.append((node + 1, net.producer, net.receive_ns))
            for v in net.consumers:
                rows.append((node, v, HUGE))
                rows.append((v, node + 1, HUGE))
            node += 2
        self.rows = [row for row in rows if row[2]]

    def bound(self, v: int) -> int:
        """The least cost of a stage that holds ``v``."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import maximum_flow

        p = self.problem
        rows = [*self.rows, (self.source, v, HUGE), *_between(v, p.before), *_between(v, p.after)]
        most = (1 << 30) - 1
        source, target, capacity = (
            np.array(column, dtype=np.int32)
            for column in zip(*((a, b, min(c // self.step, most)) for a, b, c in rows), strict=True)
        )
        network = csr_array((capacity, (source, target)), shape=(self.size, self.size))
        found = maximum_flow(network, self.source, self.sink)
        value = int(found.flow_value) * self.step
        if self.step > 1 and value < self.enough <= value + self.step * len(rows):
            value += self._rest(rows, found.flow.tocoo())
        return max(0, value - self.rounding)

    def _rest(self, rows: Sequence[tuple[int, int, int]], flow: Any) -> int:
        """What still flows beside the flow of the rounded capacities, along shortest paths, up to enough."""
        left: list[dict[int, int]] = [{} for _ in range(self.size)]
        for a, b, capacity in rows:
            left[a][b] = left[a].get(b, 0) + capacity
            left[b].setdefault(a, 0)
        out = 0
        for a, b, units in zip(flow.row.tolist(), flow.col.tolist(), flow.data.tolist(), strict=True):
            left[a][b] -= units * self.step
            out += units * self.step if a == self.source else 0
        more = 0
        while out + more < self.enough and (path := _path(left, self.source, self.sink)):
            least = min(left[a][b] for a, b in path)
            for a, b in path:
                left[a][b] -= least
                left[b][a] += least
            more += least
        return more


def _between(v: int, beside: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """An item on one side of ``v`` brings along what lies on its way to ``v``."""
    rows, seen, stack = [], {v}, [v]
    while stack:
        w = stack.pop()
        for u in beside[w]:
            rows.append((u, w, HUGE))
            if u not in seen:
                seen.add(u)
                stack.append(u)
    return rows


def _path(left: Sequence[Mapping[int, int]], source: int, sink: int) -> list[tuple[int, int]]:
    """The edges of a shortest path with room left, empty when there is none."""
    came = {source: source}
    queue = collections.deque([source])
    while queue and sink not in came:
        a = queue.popleft()
        for b, room in left[a].items():
            if room > 0 and b not in came:
                came[b] = a
                queue.append(b)
    path, at = [], sink
    while at != source and at in came:
        path.append((came[at], at))
        at = came[at]
    return path
