"""Topological orders whose intervals make good stages.

Cutting an order is left to ``intervals``.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Sequence

from ..definition.precedence import in_order
from ..definition.problem import Problem

__all__ = ["orders", "pinned"]


def orders(problem: Problem) -> Iterator[tuple[int, ...]]:
    """A few different topological orders: as given, deepest first, by level, late, and by open values.

    Each as :func:`pinned` has it. Items that no edge holds follow the last of the items they share a value
    with. Each order is O((items + edges) log items).
    """
    seen = set()
    works = [i.work_ns for i in problem.items]
    for order in _free_orders(_anchored(problem)):
        for found in pinned(problem, order, works):
            if found not in seen:
                seen.add(found)
                yield found


def pinned(
    problem: Problem, order: Sequence[int], weights: Sequence[float]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A topological order with items that pins hold to earlier stages first: before all others, or some.

    An item is held by its own pins, and by those of what needs it and what it needs. In the second order each
    comes with those of the stage where it would be were weights spread evenly, or as near as it may be: only
    there do others fill the stages before and after one that is pinned.
    """
    n, k = len(problem.items), problem.n_stages
    first, last = [i.first for i in problem.items], [problem.last_of(v) for v in range(n)]
    for v in range(n):
        first[v] = max([first[v], *(first[u] for u in problem.before[v])])
    for v in reversed(range(n)):
        last[v] = min([last[v], *(last[w] for w in problem.after[v])])
    total, done, even = sum(weights) or 1.0, 0.0, [0] * n
    for v in order:
        even[v] = min(max(first[v], int(k * done / total)), last[v])
        done += weights[v]
    # none of the three falls along an edge
    return (
        tuple(sorted(order, key=lambda v: (last[v], first[v]))),
        tuple(sorted(order, key=lambda v: (even[v], last[v], first[v]))),
    )


def _free_orders(problem: Problem) -> Iterator[tuple[int, ...]]:
    n = len(problem.items)
    given = in_order(problem.after, lambda v, t: (v,))
    yield given
    level = [0] * n
    for v in given:
        level[v] = max((level[u] + 1 for u in problem.before[v]), default=0)
    height = [0] * n
    for v in reversed(given):
        height[v] = max((height[w] for w in problem.after[v]), default=0) + problem.items[v].work_ns
    for key in (
        lambda v, t: (level[v], v),
        lambda v, t: (-height[v], v),
        lambda v, t: (-t, v),
        lambda v, t: (-t, -v),
    ):
        yield in_order(problem.after, key)
    yield _backward(problem)
    yield _closing(problem)


def _anchored(problem: Problem) -> Problem:
    """The problem with edges to each unordered item from those it shares a value with."""
    loose = {v for v in range(len(problem.items)) if not (problem.before[v] or problem.after[v])}
    edges = {
        (u, v)
        for net in problem.nets
        for v in (net.producer, *net.consumers)
        if v in loose
        for u in (net.producer, *net.consumers)
        if u not in loose or u < v
    }
    return dataclasses.replace(problem, edges=(*problem.edges, *sorted(edges))) if edges else problem


def _backward(problem: Problem) -> tuple[int, ...]:
    """Each item as late as those that need it allow: the reverse of a deepest-first walk from the end."""
    waiting = [len(a) for a in problem.after]
    stack = [v for v in range(len(waiting)) if waiting[v] == 0]
    out = []
    while stack:
        v = stack.pop()
        out.append(v)
        for u in problem.before[v]:
            waiting[u] -= 1
            if waiting[u] == 0:
                stack.append(u)
    return tuple(reversed(out))


def _closing(problem: Problem) -> tuple[int, ...]:
    """Greedily keep what crosses small: next is the ready item that opens least and closes most."""
    waiting = [len(b) for b in problem.before]
    left = [len(n.consumers) for n in problem.nets]
    makes = [0] * len(waiting)
    takes: list[list[int]] = [[] for _ in waiting]
    for n, net in enumerate(problem.nets):
        makes[net.producer] += net.send_ns + net.receive_ns
        for v in net.consumers:
            takes[v].append(n)

    def change(v: int) -> int:
        closed = (problem.nets[n] for n in takes[v] if left[n] == 1)
        return makes[v] - sum(net.send_ns + net.receive_ns for net in closed)

    heap = [(change(v), v) for v, n in enumerate(waiting) if n == 0]
    heapq.heapify(heap)
    out: dict[int, None] = {}
    while heap:
        old, v = heapq.heappop(heap)
        if v in out:
            continue
        now = change(v)
        if now > old:
            heapq.heappush(heap, (now, v))
            continue
        out[v] = None
        for n in takes[v]:
            left[n] -= 1
        for w in problem.after[v]:
            waiting[w] -= 1
            if waiting[w] == 0:
                heapq.heappush(heap, (change(w), w))
        for n in takes[v]:
            if left[n] == 1:
                for w in problem.nets[n].consumers:
                    if waiting[w] == 0 and w not in out:
                        heapq.heappush(heap, (change(w), w))
    return tuple(out)
