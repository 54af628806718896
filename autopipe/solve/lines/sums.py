"""What the fullest of the sums that bound a step comes to at least, over every chain of downsets.

Which sums those are is said by ``proof.step``. Pricing stages is left to ``pairs``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ..definition.answer import OutOfTime
from ..definition.blocks import UNDER
from ..definition.problem import HUGE, Array, Problem, Stage, most_work
from ..proof.step import Line
from .exact import Chains
from .pairs import Floats, Loads
from .reach import Bits
from .windows import TooMany, Window

__all__ = ["least_sum"]

_DOWNSETS = 1 << 13
"""The most downsets that are looked through."""
_PAIRS = 1 << 23
"""The most pairs of them that are priced."""
_CELLS = 1 << 15
"""Pairs priced in one go: few rows leave few columns near them."""
_EXACT = 1 << 15
"""Of so many pairs at most it is looked for which whole blocks are computed again."""
_NEAR = 5e-4
"""The bound is raised until what is open is less than this part of it."""


def least_sum(
    problem: Problem, line: Line, total: float, most: float, aside: int, deadline: float
) -> tuple[float, tuple[tuple[int, ...], ...]]:
    """What the largest sum of a line is at least, where ``most`` is what it may be, and chains near that.

    All loads together are ``total`` at least, and one of ``aside`` or less counts as none. What comes before
    a stage and after it is taken at its least for where the stage begins and ends, over stages whose sums are
    no more than what is looked at: that is brought down until no chain of them is left. Parts of blocks that
    are computed again count as long as there are many ways. Raises :class:`TooMany` where that is too much
    to look through, :class:`OutOfTime` past the deadline ahead of a first bound.
    """
    return _Sums(problem, line, total, most / UNDER, aside, deadline).least()


@dataclasses.dataclass(frozen=True, slots=True)
class _Pairs:
    """Where a stage may begin and end: downsets by number; what it works there, and of that in forward."""

    begin: Array
    end: Array
    works: Floats
    forward: Floats

    def picked(self, which: Bits) -> _Pairs:
        return _Pairs(self.begin[which], self.end[which], self.works[which], self.forward[which])

    def over(self, aside: int) -> _Pairs:
        """The same, without the work of those that work so little."""
        counts = self.works > aside
        return dataclasses.replace(self, works=self.works * counts, forward=self.forward * counts)


@dataclasses.dataclass(frozen=True, slots=True)
class _Open:
    """The pairs that are left of each stage, and the least work before and after each downset there.

    ``longest``: the least that the longest forward and backward before it may be. ``is_whole``: whether only
    whole blocks are computed again.
    """

    stages: Sequence[_Pairs]
    before: Sequence[Floats]
    after: Sequence[Floats]
    longest: Sequence[Sequence[Floats]]
    is_whole: bool

    @property
    def n_pairs(self) -> int:
        return sum(len(pairs.works) for pairs in self.stages)


class _Sums(Chains):
    """All chains of downsets whose every sum is at most ``top``."""

    def __init__(
        self, problem: Problem, line: Line, total: float, top: float, aside: int, deadline: float
    ) -> None:
        counted = total - aside * (line.n_ranks - 1)
        limits = [min(max(math.ceil(ns), aside), HUGE - 1) for ns in line.most_works(counted, top)]
        super().__init__(problem, max(limits), deadline, most=_DOWNSETS)
        # likes are the same for a bottleneck alone
        self.ordered, self.loads = self.problem, Loads(self.problem)
        self.alike, self.contained = (), None
        self.line, self.top, self.aside, self.limits = line, top, aside, limits
        self.known: dict[object, float] = {}  # loads with whole blocks computed again
        none, all_ns = np.zeros(len(self.problem.items), dtype=bool), (0, self.room.total_ns)
        self.layer = self._layer(Window(self.problem, none, none, all_ns, all_ns, (0, 0)))
        held = self.layer.downsets.rows.sum(axis=1)
        self.n, self.none, self.all = len(held), int(held.argmin()), int(held.argmax())

    def least(self) -> tuple[float, tuple[tuple[int, ...], ...]]:
        """What :func:`least_sum` says."""
        high = self.top
        there = self._left(self._priced(), high)
        if there is None:
            return high * UNDER, ()
        low, chains = self._passed(there), [self._chain(there)]
        with contextlib.suppress(OutOfTime):
            while high - low > _NEAR * low:
                middle = (low + high) / 2
                closer = self._left(there.stages, middle, there.is_whole)
                if closer is None:
                    low = middle
                else:
                    there, high = closer, middle
                    low = max(low, self._passed(there))
                    chains.append(self._chain(there))
        return low * UNDER, tuple(dict.fromkeys(reversed(chains)))

    def _left(self, stages: Sequence[_Pairs], most: float, is_whole: bool = False) -> _Open | None:
        """What is left where no sum is over ``most``, of whole blocks if it is little; None for no chain."""
        there = self._opened(stages, most, is_whole)
        if there is None or is_whole or there.n_pairs > _EXACT:
            return there
        return self._opened(self._whole(there), most, is_whole=True)

    def _priced(self) -> list[_Pairs]:
        """Each stage between all downsets that its limit leaves; those that are alike are priced once."""
        stages = self.problem.stages
        of_kind = dict(zip(map(_kind, stages), stages, strict=True))
        found: dict[object, list[_Pairs]] = {kind: [] for kind in of_kind}
        windows = self._begins()
        for rows, columns in self._near(self.layer, self.layer, self._most(0), _CELLS):
            held = self.loads.held((0, 0), self.layer.picked(rows), self.layer.picked(columns))
            for kind, stage in of_kind.items():
                first, last = windows[kind]
                if not first <= self.layer.work[rows[-1]] or not self.layer.work[rows[0]] <= last:
                    continue
                self.n_pairs += len(rows) * len(columns)
                if self.n_pairs > _PAIRS:
                    raise TooMany
                priced = self.loads.on(stage, held)
                x, y = np.nonzero(priced.loads <= self.bound)
                found[kind].append(_Pairs(rows[x], columns[y], priced.loads[x, y], priced.forward[x, y]))
        joined = {kind: _joined(pairs) for kind, pairs in found.items()}
        each = zip((joined[_kind(stage)] for stage in stages), self.limits, strict=True)
        return [pairs.picked(pairs.works <= limit).over(self.aside) for pairs, limit in each]

    def _begins(self) -> dict[object, tuple[int, int]]:
        """The least and the most work before stages of each kind, by what others may hold."""
        stages = self.problem.stages
        most = (most_work(limit, stage.speed) for limit, stage in zip(self.limits, stages, strict=True))
        before = [0, *itertools.accumulate(most)]
        out: dict[object, tuple[int, int]] = {}
        for s, stage in enumerate(stages):
            first, last = out.get(_kind(stage), (HUGE, 0))
            here = self.room.total_ns - (before[-1] - before[s])
            out[_kind(stage)] = min(first, here), max(last, before[s])
        return out

    def _opened(self, stages: Sequence[_Pairs], most: float, is_whole: bool) -> _Open | None:
        """What is left where no sum is over ``most``; None where no chain is."""
        n_before = -1
        while True:
            self._tick()
            before, after = [_only(self.n, self.none)], [_only(self.n, self.all)]
            longest = [before[:], before[:]]
            for pairs in stages:
                reached = before[-1][pairs.begin] + self._taking(pairs)
                before.append(self._least(pairs.end, reached))
                for row, own in zip(longest, (pairs.forward, pairs.works - pairs.forward), strict=True):
                    row.append(self._least(pairs.end, np.maximum(row[-1][pairs.begin], own)))
            for pairs in reversed(stages):
                after.append(self._least(pairs.begin, after[-1][pairs.end] + self._taking(pairs)))
            if before[-1][self.all] >= HUGE:
                return None
            there = _Open(stages, before, after[::-1], longest, is_whole)
            if there.n_pairs == n_before:
                return there
            n_before = there.n_pairs
            sums = self._sums(there)
            stages = [pairs.picked(own <= most) for pairs, own in zip(stages, sums, strict=True)]

    def _least(self, where: Array, values: Floats) -> Floats:
        """The least of the values for each downset."""
        out = np.full(self.n, float(HUGE))
        np.minimum.at(out, where, values)
        return out

    def _taking(self, pairs: _Pairs) -> Floats:
        """What a microbatch takes to pass a stage that works, and to the next one, both ways."""
        return pairs.works + self.line.hop_s * 1e9 * (pairs.works > 0)

    def _sums(self, there: _Open) -> Iterator[Floats]:
        """The sum of each stage, for each pair that is left of it."""
        for s, pairs in enumerate(there.stages):
            before, after = there.before[s][pairs.begin], there.after[s + 1][pairs.end]
            longest = there.longest[0][s][pairs.begin], there.longest[1][s][pairs.begin]
            own = pairs.forward, pairs.works - pairs.forward
            # past a stage that counts as without work one message goes on, where two are counted
            past = before + after - self.line.hop_s * 1e9
            yield np.where(pairs.works > 0, self.line.sum_of(s, before, *own, after, longest), past)

    def _whole(self, there: _Open) -> list[_Pairs]:
        """The pairs that are left, with whole blocks computed again."""
        return [self._of_blocks(*row) for row in zip(self.problem.stages, there.stages, strict=True)]

    def _of_blocks(self, stage: Stage, pairs: _Pairs) -> _Pairs:
        if not self.loads.problem.has_blocks or not len(pairs.works):
            return pairs
        rows, x = np.unique(pairs.begin, return_inverse=True)
        columns, y = np.unique(pairs.end, return_inverse=True)
        held = self.loads.held((0, 0), self.layer.picked(rows), self.layer.picked(columns))
        again = self.loads.on(stage, held).again
        works = pairs.works.copy()
        for at, place in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
            if again is not None and pairs.works[at] and again.unknown[place]:
                self._tick()
                key = _kind(stage), int(pairs.begin[at]), int(pairs.end[at])
                if key not in self.known:
                    self.known[key] = min(again.load(*place), float(HUGE))
                works[at] = max(works[at], self.known[key])
        return dataclasses.replace(pairs, works=works)

    def _passed(self, there: _Open) -> float:
        """The least of the largest sum over chains of what is left."""
        value = there.before[0]
        for pairs, own in zip(there.stages, self._sums(there), strict=True):
            value = self._least(pairs.end, np.maximum(value[pairs.begin], own))
        return float(value[self.all])

    def _chain(self, there: _Open) -> tuple[int, ...]:
        """The chain of what is left that works least in all."""
        came = []
        for before, pairs in zip(there.before, there.stages, strict=False):
            falling = np.argsort(-(before[pairs.begin] + self._taking(pairs)), kind="stable")
            came.append(np.zeros(self.n, dtype=np.int64))
            came[-1][pairs.end[falling]] = pairs.begin[falling]
        return self._assignment([self.layer.downsets] * self.k, came, self.all)


def _kind(stage: Stage) -> object:
    return stage.speed, stage.in_flight, stage.limit_bytes


def _joined(pairs: Iterable[_Pairs]) -> _Pairs:
    rows = [(p.begin, p.end, p.works, p.forward) for p in pairs]
    return _Pairs(*map(np.concatenate, zip(*rows, strict=True)))


def _only(n: int, x: int) -> Floats:
    out = np.full(n, float(HUGE))
    out[x] = 0.0
    return out
