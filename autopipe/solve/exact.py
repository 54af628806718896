"""The optimum over every chain of downsets, with proof: guess a bound, look at all that fits under it.

Enumerating the downsets that a bound leaves is left to ``windows``, pricing the stages between them to
``pairs``, first answers to ``intervals``.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import numpy as np

from .bounds import Room, at_bound, lower_bound
from .mincut import dearest_item
from .pairs import Floats, Layer, Loads
from .problem import HUGE, Array, Problem, most_work
from .windows import Downsets, TooMany, Windows

__all__ = ["Answer", "prove"]

_CELLS = 1 << 21
"""Pairs priced in one go: 16 MiB a matrix."""
_DOWNSETS = 1 << 18
"""The most downsets of a window that are looked through."""
_FIRST_STEP = 64
"""The first bound tried is the lower one and this part of the way to the best known."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The best assignment known, its bottleneck, and a bottleneck that no assignment beats."""

    stage_of: tuple[int, ...] | None
    bottleneck_ns: int
    lower_ns: int

    @property
    def proved(self) -> bool:
        return self.bottleneck_ns <= self.lower_ns


class OutOfTime(Exception):
    """The deadline passed."""


def prove(problem: Problem, known: Answer, deadline: float) -> Answer:
    """The best assignment of a separable problem, starting from one that is known.

    Bounds from the lower one up are tried in growing steps: one that no chain meets is a certificate, the
    first that one meets gives the optimum. Stops at ``deadline`` (``time.perf_counter``) or Ctrl-C with the
    best so far and the last certified bound. Worst case exponential in the width of the graph; near linear
    on chains.
    """
    lower = max(known.lower_ns, lower_bound(problem))
    best = known
    if not problem.is_separable:
        return known
    if best.bottleneck_ns > lower and best.stage_of is not None:
        under = at_bound(problem, best.bottleneck_ns - 1).problem
        lower = max(lower, min(dearest_item(under, best.bottleneck_ns, deadline), best.bottleneck_ns))
    top = min(best.bottleneck_ns - 1, _dearest(problem))
    step = max(1, (top - lower) // _FIRST_STEP)
    while best.bottleneck_ns > lower:
        bound = max(lower, min(lower + step, top))
        try:
            found = Chains(problem, bound, deadline).best()
        except (OutOfTime, TooMany, KeyboardInterrupt):
            break
        if found is None:
            lower, step = HUGE if bound >= _dearest(problem) else bound + 1, 2 * step
        else:
            value, stage_of = found
            best, lower = Answer(stage_of, value, value), value
    return dataclasses.replace(best, lower_ns=min(lower, best.bottleneck_ns))


def _dearest(problem: Problem) -> int:
    """More than any stage costs."""
    slowest = min(s.speed for s in problem.stages)
    work = 2 * problem.total_ns + sum(2 * s.forward_ns + s.backward_ns for s in problem.shares)
    transfers = sum(n.send_ns + n.receive_ns for n in problem.nets) + sum(s.sync_ns for s in problem.shares)
    return math.ceil(work / slowest) + 2 + transfers


class Chains:
    """All chains of downsets whose every load is at most ``bound``, layer by layer."""

    def __init__(self, problem: Problem, bound: int, deadline: float) -> None:
        self.contraction = at_bound(problem, bound)
        self.problem = p = self.contraction.problem
        self.bound, self.deadline, self.k = bound, deadline, p.n_stages
        self.room = Room.of(p)
        self.windows = Windows(p, self._tick, _DOWNSETS)
        self.loads = Loads(p)

    def best(self) -> tuple[int, tuple[int, ...]] | None:
        """The least bottleneck of the chains and its assignment in the original items, if there is one."""
        layers = self._layers()
        if layers is None:
            return None
        value: Floats = np.zeros(1)
        came: list[Array] = []
        for s in range(self.k):
            value, parent = self._step(s, layers[s], layers[s + 1], value)
            reached = np.flatnonzero(value <= self.bound)
            if not len(reached):
                return None
            layers[s + 1], value = layers[s + 1].picked(reached), value[reached]
            came.append(parent[reached])
        return int(value[0]), self._assignment([layer.downsets for layer in layers], came)

    def _layers(self) -> list[Layer] | None:
        """The downsets after each number of stages that leave room for the others; None where none does."""
        layers = []
        for i, (low, high) in enumerate(self._bounds()):
            found = self.windows.between(low, high, i)
            if found is None:
                return None
            layer = self.loads.layer(found)
            fitting = self._fitting(layer, i)
            if not len(fitting):
                return None
            layers.append(layer.picked(fitting))
        return layers

    def _bounds(self) -> list[tuple[int, int]]:
        """The least and the most work before each cut, neither ever falling."""
        total = self.room.total_ns
        rows = [(0, 0)]
        for i in range(1, self.k):
            before, after = self._left(i)
            low, high = total - after, min(total, before)
            rows.append((max(low, rows[-1][0]), max(high, rows[-1][1])))
        return [*rows, (total, total)]

    def _left(self, i: int) -> tuple[int, int]:
        """The work that fits into the first ``i`` stages and into the others, beside the least transfers."""
        room, k = self.room, self.k
        before, after = room.work(range(i), self.bound), room.work(range(i, k), self.bound)
        if self.problem.allow_empty and self.bound < room.send_ns + room.receive_ns:
            return before, after
        return before - sum(room.first(i)), after - sum(room.last(k - i))

    def _fitting(self, layer: Layer, i: int) -> Array:
        """The rows whose open values leave room for the work on either side of them."""
        everything = np.arange(len(layer.work))
        if self.problem.overlap or i in (0, self.k):
            return everything
        before, after = self._left(i)
        spare_send, spare_receive = self.room.first(i)[0], self.room.last(self.k - i)[1]
        sends = self._as_work(layer.sums["send_ns"] - spare_send)
        receives = self._as_work(layer.sums["receive_ns"] - spare_receive)
        fits = layer.work + sends <= before
        fits &= self.room.total_ns - layer.work + receives <= after
        return everything[fits]

    def _as_work(self, transfers: Array) -> Array:
        each = np.maximum(0, transfers)
        known, place = np.unique(each, return_inverse=True)
        return np.array([self.room.as_work(int(t)) for t in known], dtype=np.int64)[place]

    def _step(self, s: int, a: Layer, b: Layer, value: Floats) -> tuple[Floats, Array]:
        """The least bottleneck of chains up to each downset after stage ``s``, and the row before it."""
        best = np.full(len(b.work), np.inf)
        parent = np.zeros(len(b.work), dtype=np.int64)
        most = most_work(self.bound, self.problem.stages[s].speed)
        size = max(1, _CELLS // len(b.work))
        for at in range(0, len(a.work), size):
            self._tick()
            rows = np.arange(at, min(at + size, len(a.work)))
            first = int(np.searchsorted(b.work, a.work[at]))
            last = int(np.searchsorted(b.work, a.work[rows[-1]] + most, side="right"))
            if first == last:
                continue
            columns = np.arange(first, last)
            loads = self.loads.of(s, a.picked(rows), b.picked(columns))
            np.maximum(loads, value[rows, None], out=loads)
            least = loads.argmin(axis=0)
            found = loads[least, columns - first]
            better = found < best[first:last]
            best[columns[better]], parent[columns[better]] = found[better], at + least[better]
        return best, parent

    def _assignment(self, layers: Sequence[Downsets], came: Sequence[Array]) -> tuple[int, ...]:
        stage_of = np.zeros(len(self.problem.items), dtype=np.int64)
        row = 0
        for s in range(self.k - 1, -1, -1):
            row = int(came[s][row])
            stage_of[~layers[s].holds(row)] += 1
        return self.contraction.expand((stage_of - 1).tolist())

    def _tick(self) -> None:
        if time.perf_counter() > self.deadline:
            raise OutOfTime
