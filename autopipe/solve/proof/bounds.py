"""What no chain can beat: room left by the total work, the cheapest cuts, and single items.

Bounds hold for every assignment of a separable problem; searching with them is left to ``exact``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from ..definition.contract import Contraction, contract, merge
from ..definition.problem import Array, Net, Problem, most_work

__all__ = ["Room", "at_bound", "lower_bound"]

T = TypeVar("T", int, Array)


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """What the first i and the last i stages can hold together where no load exceeds a bound.

    ``outward_ns`` and ``inward_ns`` are the least that a stage pays for values between it and later stages
    which holds no sink, and for those between it and earlier ones which holds no source: what the last item
    of such a stage makes or takes of later items crosses, and what the topmost does of earlier ones. Later
    stages pay at least ``passed_ns`` for the former.
    ``sinks`` and ``sources`` count the items that have neither; ``slowest`` and ``is_even`` of all speeds.
    Where stages may be empty, using fewer never leaves more room as long as the bound is at least one stage's
    least transfers.
    """

    problem: Problem
    total_ns: int
    outward_ns: int
    inward_ns: int
    passed_ns: int
    sources: int
    sinks: int
    slowest: float
    is_even: bool

    @classmethod
    def of(cls, problem: Problem) -> Room:
        outward = [0] * len(problem.items)
        inward = [0] * len(problem.items)
        passed = [0] * len(problem.items)
        for net, direction in zip(problem.nets, problem.directions, strict=True):
            if direction > 0:
                outward[net.producer] += net.send_ns
                passed[net.producer] += net.receive_ns
                for v in net.consumers:
                    inward[v] += net.receive_ns
            elif direction < 0:
                inward[net.producer] += net.send_ns
                for v in net.consumers:
                    outward[v] += net.receive_ns
                    passed[v] += net.send_ns * (len(net.consumers) == 1)
        passes = [v for v in range(len(problem.items)) if problem.after[v]]
        takes = [v for v in range(len(problem.items)) if problem.before[v]]
        hidden = problem.overlap
        return cls(
            problem,
            problem.total_ns,
            0 if hidden else min((outward[v] for v in passes), default=0),
            0 if hidden else min((inward[v] for v in takes), default=0),
            0 if hidden else min((passed[v] for v in passes), default=0),
            len(problem.items) - len(takes),
            len(problem.items) - len(passes),
            min(s.speed for s in problem.stages),
            all(s.speed == 1.0 for s in problem.stages),
        )

    def work(self, stages: range, bound: int) -> int:
        """The most work that a run of stages can hold within the bound, transfers aside."""
        return sum(most_work(bound, self.problem.stages[s].speed) for s in stages)

    def as_work(self, transfers_ns: T) -> T:
        """The least work that stages could have done instead of their transfers; of one or an array."""
        if self.problem.overlap:
            return transfers_ns * 0
        if self.slowest == 1.0:
            return transfers_ns
        least = np.floor(transfers_ns * self.slowest) - 2 * self.problem.n_stages
        if isinstance(transfers_ns, np.ndarray):
            whole: Array = np.maximum(0, least).astype(np.int64)
            return whole
        return max(0, int(least))

    def first(self, i: int) -> tuple[int, int]:
        """The least that the first ``i`` stages pay outward, and inward."""
        later = i < self.problem.n_stages and not self.problem.allow_empty
        return self._least(i, 0 if self.sinks == 1 and later else self.sinks, self.sources)

    def last(self, i: int) -> tuple[int, int]:
        """The least that the last ``i`` stages pay outward, and inward."""
        earlier = i < self.problem.n_stages and not self.problem.allow_empty
        return self._least(i, self.sinks, 0 if self.sources == 1 and earlier else self.sources)

    def passed(self, i: int) -> int:
        """The least that the last ``i`` stages pay inward for what crosses out of each other."""
        if not self.is_even:
            return 0
        return max(0, i - self.sinks) * self.passed_ns

    def _least(self, i: int, sinks: int, sources: int) -> tuple[int, int]:
        if not self.is_even:
            return 0, 0
        return max(0, i - sinks) * self.outward_ns, max(0, i - sources) * self.inward_ns


def lower_bound(problem: Problem) -> int:
    """The largest of a fair share of everything that must be paid, the dearest item, and what must share.

    O(items log items).
    """
    room = Room.of(problem)
    k = problem.n_stages
    if not room.is_even:
        return max(problem.dearest_ns, math.floor(room.total_ns / sum(s.speed for s in problem.stages)) - 2)
    used = range(1, k + 1) if problem.allow_empty else (k,)
    fair = min(-(-(room.total_ns + sum(room.first(j))) // j) for j in used)
    return max(problem.dearest_ns, fair, _beside_another(sorted(i.work_ns for i in problem.items), k))


def _beside_another(works: Sequence[int], k: int) -> int:
    """What items cost that share a stage for want of others: of the m·k + 1 dearest, m + 1 do.

    ``works`` rise. After Martello and Toth, Lower bounds for bin packing (1990).
    """
    n = len(works)
    sums = list(itertools.accumulate(works, initial=0))
    return max((sums[n - m * k + m] - sums[n - m * k - 1] for m in range(1, (n - 1) // k + 1)), default=0)


def at_bound(problem: Problem, bound: int) -> Contraction:
    """The problem with every value merged whose crossing would leave too little room for the work.

    All chains whose every load is at most ``bound`` survive, or one as good does.
    """
    whole = Contraction(problem, tuple(range(len(problem.items))))
    if problem.overlap:
        return whole
    while True:
        small = whole.problem
        room = Room.of(small)
        least = room.first(small.n_stages)
        if small.allow_empty and bound < room.outward_ns + room.inward_ns:
            return whole
        slack = room.work(range(small.n_stages), bound) - room.total_ns - sum(least)
        sets = [
            (net.producer, *net.consumers)
            for net, direction in zip(small.nets, small.directions, strict=True)
            if room.as_work(_beside(room, net, direction, least)) > slack
        ]
        if not sets:
            return whole
        whole = whole.then(merge(small, sets))
        whole = whole.then(contract(whole.problem))


def _beside(room: Room, net: Net, direction: int, least: tuple[int, int]) -> int:
    """What a value that crosses costs at least beside the least transfers of all stages."""
    outward, inward = room.outward_ns * bool(least[0]), room.inward_ns * bool(least[1])
    if direction < 0:
        outward, inward = inward, outward
    elif not direction:
        outward = inward = max(outward, inward)
    return max(0, net.send_ns - outward) + max(0, net.receive_ns - inward)
