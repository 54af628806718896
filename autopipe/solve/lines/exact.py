"""The optimum over every chain of downsets, with proof: guess a bound, look at all that fits under it.

Enumerating the downsets that a bound leaves is left to ``windows``, pricing the stages between them to
``pairs``, first answers to ``intervals``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from ..definition.answer import Answer, OutOfTime
from ..definition.problem import HUGE, Array, Problem, most_work
from ..proof.bounds import Room, at_bound, lower_bound
from ..proof.mincut import dearest_item
from ..proof.program import Program
from ..stopping import clock_s
from .alike import Alike, likes
from .contained import Contained
from .pairs import Floats, Layer, Loads
from .reach import Reach
from .windows import Downsets, TooMany, Window

__all__ = ["glance", "prove"]

_CELLS = 1 << 18
"""Pairs priced in one go: 2 MiB a matrix, and so long between looks at the clock."""
_SHORT = 1 << 17
"""Pairs under one bound after which the next is taken with care."""
_DOWNSETS = 1 << 20
"""The most downsets of a window that are looked through."""
_SAMPLE = 1 << 12
"""How many downsets of a window to look at for a good answer rather than for a proof."""
_MOVES = 64
"""The most binary variables of an integer program that HiGHS is asked to solve."""
_PRECISE = 10**11
"""Larger loads are too large for a proof in floating point."""
_NEAR = 200
"""A bound under the best known by one part of so many is tried first."""
_PROBED = 1 << 11
"""The most downsets of a window that are looked through for it."""
_GLANCED = 1 << 18
"""The most pairs priced before other orders have had their turn."""
_FIRST_STEP = 64
"""The first bound tried is the lower one and this part of the way to the best known."""


def prove(problem: Problem, known: Answer, deadline: float) -> Answer:
    """The best assignment of a separable problem, starting from one that is known.

    Bounds from the lower one up are tried in growing steps: one that no chain meets is a certificate, the
    first that one meets gives the optimum. Where that is long, chains over some of the downsets improve the
    best known first; where it is too much, an integer program closes what small problems leave open. Stops
    at ``deadline`` (by ``stopping.clock_s``) or Ctrl-C with the best so far and the last certified bound.
    Worst case exponential in the width of the graph; near linear on chains.
    """
    if not problem.is_separable:
        return known
    search = _Search(problem, known, deadline)
    with contextlib.suppress(OutOfTime, KeyboardInterrupt):
        search.run()
    return search.answer


def glance(problem: Problem, known: Answer, deadline: float) -> Answer:
    """The same where little is to be looked through under what is known: most often its proof."""
    search = _Search(problem, known, deadline)
    with contextlib.suppress(OutOfTime, TooMany):
        if search.probe(_GLANCED) and not search.answer.proved:
            bound = search.answer.bottleneck_ns - 1
            chains = Chains(problem, bound, deadline, most=_PROBED, most_pairs=_GLANCED)
            search.learn(chains, chains.best())
    return search.answer


class _Search:
    """What is known of a problem's optimum, closing in from both sides."""

    def __init__(self, problem: Problem, known: Answer, deadline: float) -> None:
        self.problem, self.deadline = problem, deadline
        self.best, self.lower = known, max(known.lower_ns, lower_bound(problem))
        self.top = _dearest(problem)
        self.sampled = False

    @property
    def answer(self) -> Answer:
        return dataclasses.replace(self.best, lower_ns=min(self.lower, self.best.bottleneck_ns))

    def run(self) -> None:
        """Tries bounds until both sides meet, or the next one is too much."""
        if clock_s() > self.deadline:
            return
        if self.best.stage_of is not None and not self.answer.proved:
            under = at_bound(self.problem, self.best.bottleneck_ns - 1).problem
            self.lower = max(self.lower, dearest_item(under, self.best.bottleneck_ns, self.deadline))
        parts = 1 if self.probe(HUGE) else _FIRST_STEP
        step = max(1, (min(self.best.bottleneck_ns, self.top) - self.lower) // parts)
        ceiling = HUGE
        while not self.answer.proved and ceiling - self.lower > 1:
            bound = max(self.lower, min(self.lower + step, self.best.bottleneck_ns - 1, self.top))
            chains = Chains(self.problem, bound, self.deadline)
            try:
                found = chains.best()
                self.learn(chains, found)
                ceiling = ceiling if found is None else self.lower
            except TooMany:
                ceiling, step = bound, (bound - self.lower) // 4
                if step < (self.best.bottleneck_ns - self.lower) // 256:
                    break
            else:
                half = (min(ceiling, self.best.bottleneck_ns) - self.lower) // 2
                if ceiling < HUGE:
                    step = max(1, min(2 * step, half))
                else:
                    step = max(step + 1, min(2 * step, half if chains.n_pairs > _SHORT else HUGE))
            if (chains.n_pairs > _SHORT or ceiling < HUGE) and not self.sampled:
                self._sample()
        if not self.answer.proved and not self.sampled:
            self._sample()
        if not self.answer.proved:
            self._close()

    def probe(self, most_pairs: int) -> bool:
        """What is just under the best known, or all where that is near, if it is little to look through.

        Whether it was little: all under the best known then is hardly more, and looked through at once.
        """
        bound = self.best.bottleneck_ns - self.best.bottleneck_ns // _NEAR
        if self.best.stage_of is None or self.answer.proved:
            return False
        if bound <= self.lower:
            bound = self.best.bottleneck_ns - 1
        chains = Chains(self.problem, bound, self.deadline, most=_PROBED, most_pairs=most_pairs)
        try:
            self.learn(chains, chains.best())
        except TooMany:
            return False
        return True

    def learn(self, chains: Chains, found: tuple[int, tuple[int, ...]] | None) -> None:
        """What a pass over all chains under a bound says."""
        if found is None:
            self.lower = HUGE if chains.bound >= self.top else chains.bound + 1
        else:
            self.lower = found[0]
            self._keep(found[1])

    def _keep(self, stage_of: tuple[int, ...]) -> None:
        """Keeps a chain where it is better: a search for blocks that was cut off may price it low."""
        value = self.problem.bottleneck(self.problem.loads(stage_of))
        if value < self.best.bottleneck_ns and self.problem.is_valid(stage_of):
            self.best = Answer(stage_of, value, self.lower)

    def _sample(self) -> None:
        """Better chains over some of the downsets under bounds from the middle of what is open upwards."""
        self.sampled, part = True, 0.5
        while part < 0.95 and not self.answer.proved:
            above = min(self.best.bottleneck_ns - 1, self.top) - self.lower
            found = Chains(self.problem, self.lower + int(part * above), self.deadline, _SAMPLE).best()
            before = self.best
            if found is not None:
                self._keep(found[1])
            if self.best is before:
                part = (1 + part) / 2

    def _close(self) -> None:
        """What few items may still do under the best known, as an integer program."""
        chains = Chains(self.problem, min(self.best.bottleneck_ns - 1, self.top), self.deadline)
        program = chains.program()
        if program is None or program.n_moves > _MOVES or self.top > _PRECISE:
            return
        stage_of, lower = program.best(self.deadline - clock_s())
        self.lower = max(self.lower, min(lower, self.best.bottleneck_ns))
        if stage_of is not None:
            self._keep(chains.contraction.expand(stage_of))


def _dearest(problem: Problem) -> int:
    """More than any stage costs."""
    slowest = min(s.speed for s in problem.stages)
    work = 2 * problem.total_ns + sum(b.forward_ns for i in problem.items for b in i.blocks)
    work += sum(2 * s.forward_ns + s.backward_ns for s in problem.shares)
    sides = (
        side for n in problem.nets for side in zip(*(n.link_ns or [(n.send_ns, n.receive_ns)]), strict=True)
    )
    transfers: int = sum(map(max, sides)) + sum(s.sync_ns for s in problem.shares)
    return math.ceil(work / slowest) + 2 + transfers


class Chains:
    """All chains of downsets whose every load is at most ``bound``, layer by layer."""

    def __init__(
        self,
        problem: Problem,
        bound: int,
        deadline: float,
        sample: int = 0,
        most: int = 0,
        most_pairs: int = HUGE,
    ) -> None:
        self.contraction = at_bound(problem, bound)
        self.problem = self.ordered = p = self.contraction.problem
        self.bound, self.deadline, self.k = bound, deadline, p.n_stages
        self.sample, self.most = sample, sample or most or _DOWNSETS
        self.room = Room.of(p)
        self.loads = Loads(p)
        self.alike: tuple[Alike, ...] = ()
        self.contained: Contained | None = None
        if self.loads.plain and not p.shares and not self.loads.turned:
            self.ordered, priced, self.alike = likes(p)
            self.loads = Loads(priced)
            self.contained = Contained(priced, self.alike)
        self.n_pairs, self.most_pairs = 0, most_pairs

    def best(self) -> tuple[int, tuple[int, ...]] | None:
        """The least bottleneck of the chains and its assignment in the original items, if there is one."""
        windows = self._windows()
        if windows is None:
            return None
        layers = [self._layer(windows[0])]
        value: Floats = np.zeros(1)
        came: list[Array] = []
        for s in range(self.k):
            layer = self._layer(windows[s + 1])
            if self.n_pairs + len(value) * len(layer.work) > self.most_pairs:
                raise TooMany
            value, parent = self._step(s, layers[s], layer, value)
            reached = np.flatnonzero(value <= self.bound)
            if not len(reached):
                return None
            layers.append(layer.picked(reached))
            value = value[reached]
            came.append(parent[reached])
        return int(value[0]), self._assignment([layer.downsets for layer in layers], came)

    def program(self) -> Program | None:
        """The same search as an integer program, where that can say it all."""
        p = self.problem
        reached = Reach(p, self._tick).stages(self.bound, self._bounds())
        if not self.loads.plain or p.shares or reached is None:
            return None
        return Program(p, *reached)

    def _layer(self, window: Window) -> Layer:
        return self.loads.layer(window.downsets(self._tick, self.most, some=self.sample > 0))

    def _windows(self) -> list[Window] | None:
        """What may lie before each cut; None where the bound leaves an item no stage."""
        bounds = self._bounds()
        reach = Reach(self.ordered, self._tick)
        stages = reach.stages(self.bound, bounds)
        if stages is None:
            return None
        first, last = stages
        cuts = range(self.k + 1)
        base, out = [last < i for i in cuts], [first >= i for i in cuts]
        windows = []
        for i in cuts:
            low, high = int(reach.works[base[i]].sum()), int(reach.works[~out[i]].sum())
            if i < self.k:
                low = max(low, int(reach.works[base[i + 1]].sum()) - self._most(i))
            if i:
                high = min(high, int(reach.works[~out[i - 1]].sum()) + self._most(i - 1))
            windows.append(Window(self.ordered, base[i], out[i], (low, high), bounds[i], self._spare(i)))
        return windows

    def _most(self, s: int) -> int:
        """The most work of a stage."""
        return most_work(self.bound, self.problem.stages[s].speed)

    def _spare(self, i: int) -> tuple[int, int]:
        """What the room before and after a cut allows for sending and receiving already."""
        if not 0 < i < self.k or not self._is_tight:
            return 0, 0
        return self.room.first(i)[0], self.room.last(self.k - i)[1] - self.room.passed(self.k - i)

    @property
    def _is_tight(self) -> bool:
        """Whether every stage can be held to the least transfers."""
        room = self.room
        return not self.problem.allow_empty or self.bound >= room.outward_ns + max(
            room.inward_ns, room.passed_ns
        )

    def _bounds(self) -> list[tuple[int, int]]:
        """The least and the most work before each cut."""
        room, k, total = self.room, self.k, self.room.total_ns
        rows = [(0, 0)]
        for i in range(1, k):
            before, after = room.work(range(i), self.bound), room.work(range(i, k), self.bound)
            if self._is_tight:
                before, after = before - sum(room.first(i)), after - sum(room.last(k - i))
            rows.append((total - after, before))
        return [*rows, (total, total)]

    def _step(self, s: int, a: Layer, b: Layer, value: Floats) -> tuple[Floats, Array]:
        """The least bottleneck of chains up to each downset after stage ``s``, and the row before it."""
        if self.contained and len(b.work):
            best, parent, n_pairs = self.contained.step(a, b, value, self.bound, self._tick)
            self.n_pairs += n_pairs
            return best, parent
        best = np.full(len(b.work), np.inf)
        if not len(b.work):
            return best, best.astype(np.int64)
        parent = np.zeros(len(b.work), dtype=np.int64)
        for rows, columns in self._near(a, b, self._most(s), _CELLS):
            self.n_pairs += len(rows) * len(columns)
            priced = self.loads.of(s, a.picked(rows), b.picked(columns))
            least, found = priced.least(value[rows, None], self.bound, self._tick)
            better = found < best[columns]
            best[columns[better]], parent[columns[better]] = found[better], rows[0] + least[better]
        return best, parent

    def _near(self, a: Layer, b: Layer, most: int, cells: int) -> Iterator[tuple[Array, Array]]:
        """Rows of one layer and those of the next within so much work of one, so many pairs at a time."""
        size = max(1, cells // max(1, len(b.work)))
        for at in range(0, len(a.work), size):
            self._tick()
            rows = np.arange(at, min(at + size, len(a.work)))
            first = int(np.searchsorted(b.work, a.work[at]))
            last = int(np.searchsorted(b.work, a.work[rows[-1]] + most, side="right"))
            if first < last:
                yield rows, np.arange(first, last)

    def _assignment(self, layers: Sequence[Downsets], came: Sequence[Array], row: int = 0) -> tuple[int, ...]:
        """The stages of the items on the way that came to a row of the last layer."""
        stage_of = np.zeros(len(self.problem.items), dtype=np.int64)
        for s in range(self.k - 1, -1, -1):
            row = int(came[s][row])
            stage_of[~layers[s].holds(row)] += 1
        out: list[int] = (stage_of - 1).tolist()
        for each in self.alike:
            each.settle(out)
        return self.contraction.expand(out)

    def _tick(self) -> None:
        if clock_s() > self.deadline:
            raise OutOfTime
