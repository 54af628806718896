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
from .reach import Reach
from .windows import Downsets, TooMany, Window

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
        chains = Chains(problem, bound, deadline)
        try:
            found = chains.best()
        except (OutOfTime, TooMany, KeyboardInterrupt):
            break
        if found is None:
            lower = HUGE if bound >= _dearest(problem) else bound + 1
            step = max(step + 1, round(step * (2 if chains.n_pairs < _CELLS else 1.25)))
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
        self.loads = Loads(p)
        self.n_pairs = 0

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
        windows = self._windows()
        if windows is None:
            return None
        layers = []
        for window in windows:
            found = window.downsets(self._tick, _DOWNSETS)
            if not len(found):
                return None
            layers.append(self.loads.layer(found))
        return layers

    def _windows(self) -> list[Window] | None:
        """What may lie before each cut; None where the bound leaves an item no stage."""
        bounds = self._bounds()
        reach = Reach(self.problem)
        stages = reach.stages(self.bound, bounds)
        if stages is None:
            return None
        first, last = stages
        cuts = range(self.k + 1)
        base, out = [last < i for i in cuts], [first >= i for i in cuts]
        for i in range(1, self.k):
            most = most_work(self.bound, self.problem.stages[i].speed)
            low = int(reach.works[base[i + 1]].sum()) - most
            bounds[i] = max(bounds[i][0], low), bounds[i][1]
        for i in range(1, self.k):
            most = most_work(self.bound, self.problem.stages[i - 1].speed)
            high = int(reach.works[~out[i - 1]].sum()) + most
            bounds[i] = bounds[i][0], min(bounds[i][1], high)
        return [Window(self.problem, base[i], out[i], *bounds[i], self._spare(i)) for i in cuts]

    def _spare(self, i: int) -> tuple[int, int]:
        """What the room before and after a cut allows for sending and receiving already."""
        if not 0 < i < self.k or not self._is_tight:
            return 0, 0
        return self.room.first(i)[0], self.room.last(self.k - i)[1]

    @property
    def _is_tight(self) -> bool:
        """Whether every stage can be held to the least transfers."""
        room = self.room
        return not self.problem.allow_empty or self.bound >= room.send_ns + room.receive_ns

    def _bounds(self) -> list[tuple[int, int]]:
        """The least and the most work before each cut."""
        room, k, total = self.room, self.k, self.room.total_ns
        rows = [(0, 0)]
        for i in range(1, k):
            before, after = room.work(range(i), self.bound), room.work(range(i, k), self.bound)
            if self._is_tight:
                before, after = before - sum(room.first(i)), after - sum(room.last(k - i))
            rows.append((max(0, total - after), min(total, before)))
        return [*rows, (total, total)]

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
            self.n_pairs += len(rows) * len(columns)
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
