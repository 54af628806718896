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

    @property
    def backward(self) -> Floats:
        return self.works - self.forward

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
        # ranks that may have all microbatches of a step in flight
        self.n_first = max(0, line.n_ranks - line.n_microbatches) if line.in_turn else 0
        self.known: dict[object, float] = {}  # loads with whole blocks computed again
        none, all_ns = np.zeros(len(self.problem.items), dtype=bool), (0, self.room.total_ns)
        self.layer = self._layer(Window(self.problem, none, none, all_ns, all_ns, (0, 0)))
        held = self.layer.downsets.rows.sum(axis=1)
        self.n, self.none, self.all = len(held), int(held.argmin()), int(held.argmax())

    def least(self) -> tuple[float, tuple[tuple[int, ...], ...]]:
        """What :func:`least_sum` says."""
        first = self._left(self._priced(), self.top)
        if first is None:
            return self.top * UNDER, ()
        low, chains = self._passed(first), [self._chain(first)]
        with contextlib.suppress(OutOfTime):
            for in_parts in (False, True)[: 1 + (self.n_first > 0)]:
                there, high = first, self.top
                while high - low > _NEAR * low:
                    middle = (low + high) / 2
                    closer = self._left(there.stages, middle, there.is_whole)
                    left = self._part(closer, middle) if in_parts and closer is not None else closer
                    if closer is None or left is None:
                        low = middle
                    else:
                        there, high = closer, middle
                        low = max(low, self._passed(there))
                        chains.append(self._chain(left))
        return low * UNDER, tuple(dict.fromkeys(reversed(chains)))

    def _left(self, stages: Sequence[_Pairs], most: float, is_whole: bool = False) -> _Open | None:
        """What is left where no sum is over ``most``, of whole blocks if it is little; None for no chain."""
        there = self._opened(stages, most, is_whole)
        if there is None or is_whole or there.n_pairs > _EXACT:
            return there
        return self._opened(self._whole(there), most, is_whole=True)

    def _part(self, there: _Open, most: float) -> _Open | None:
        """What is left of those whose longest backward on the first ranks lies so near; None for no chain.

        Where microbatches are fewer than ranks, all that follow wait for it, and the more of it the less the
        other ranks may work in all: both are at their least in no one chain.
        """
        parts = [(there, 0.0, float(HUGE))]
        while parts:
            around, low, high = parts.pop()
            part = self._opened(around.stages, most, there.is_whole, (low, high))
            if part is None:
                continue
            high = min(high, self._longest_first(part.stages))
            if (high - low) * self.line.n_microbatches <= _NEAR * most:
                return part
            middle = (low + high) / 2
            parts += [(part, middle, high), (part, low, middle)]
        return None

    def _longest_first(self, stages: Sequence[_Pairs]) -> float:
        """The longest backward that is left on the first ranks."""
        return max(float(pairs.backward.max(initial=0.0)) for pairs in stages[: self.n_first])

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

    def _opened(
        self,
        stages: Sequence[_Pairs],
        most: float,
        is_whole: bool,
        longest_first: tuple[float, float] = (0.0, HUGE),
    ) -> _Open | None:
        """What is left where no sum is over ``most``; None where no chain is.

        Of chains whose longest backward on the first ranks is between two.
        """
        n_before, (low, high) = -1, longest_first
        first = [pairs.picked(pairs.backward <= high) for pairs in stages[: self.n_first]]
        stages = [*first, *stages[self.n_first :]]
        while True:
            self._tick()
            if low > 0 and self._longest_first(stages) < low:
                return None
            before, after = [_only(self.n, self.none)], [_only(self.n, self.all)]
            longest = [before[:], before[:]]
            for s, pairs in enumerate(stages, 1):
                reached = before[-1][pairs.begin] + self._taking(pairs)
                before.append(self._least(pairs.end, reached))
                for row, own in zip(longest, (pairs.forward, pairs.backward), strict=True):
                    row.append(self._least(pairs.end, np.maximum(row[-1][pairs.begin], own)))
                if s == self.n_first:
                    longest[1][-1] = np.maximum(longest[1][-1], low)
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
        return pairs.works + self.line.hop_ns * (pairs.works > 0)

    def _sums(self, there: _Open) -> Iterator[Floats]:
        """The sum of each stage, for each pair that is left of it."""
        for s, pairs in enumerate(there.stages):
            before, after = there.before[s][pairs.begin], there.after[s + 1][pairs.end]
            longest = there.longest[0][s][pairs.begin], there.longest[1][s][pairs.begin]
            own = pairs.forward, pairs.backward
            # past a stage that counts as without work one message goes on, where two are counted
            past = before + after - self.line.hop_ns
            yield np.where(pairs.works > 0, self.line.sum_of(s, before, *own, after, longest), past)

    def _whole(self, there: _Open) -> list[_Pairs]:
        """The pairs that are left, with whole blocks computed again; those of alike stages are held once."""
        out = list(there.stages)
        if not self.loads.problem.has_blocks:
            return out
        for own in self._alike_stages():
            works = self._of_blocks(self.problem.stages[own[0]], _joined(out[s] for s in own))
            ends = np.cumsum([len(out[s].works) for s in own])
            for s, part in zip(own, np.split(works, ends[:-1]), strict=True):
                out[s] = dataclasses.replace(out[s], works=part)
        return out

    def _alike_stages(self) -> Iterable[list[int]]:
        own: dict[object, list[int]] = {}
        for s, stage in enumerate(self.problem.stages):
            own.setdefault(_kind(stage), []).append(s)
        return own.values()

    def _of_blocks(self, stage: Stage, pairs: _Pairs) -> Floats:
        """What the pairs work where blocks are whole."""
        works = pairs.works.copy()
        begins = np.unique(pairs.begin)
        size = max(1, _CELLS // self.n)
        for rows in (begins[at : at + size] for at in range(0, len(begins), size)):
            here = np.flatnonzero((pairs.begin >= rows[0]) & (pairs.begin <= rows[-1]) & (pairs.works > 0))
            if not len(here):
                continue
            columns, y = np.unique(pairs.end[here], return_inverse=True)
            x = np.searchsorted(rows, pairs.begin[here])
            held = self.loads.held((0, 0), self.layer.picked(rows), self.layer.picked(columns))
            again = self.loads.on(stage, held).again
            if again is None:
                continue
            is_open = again.unknown[x, y]
            for at, *place in zip(
                here[is_open].tolist(), x[is_open].tolist(), y[is_open].tolist(), strict=True
            ):
                self._tick()
                key = _kind(stage), int(pairs.begin[at]), int(pairs.end[at])
                if key not in self.known:
                    self.known[key] = min(again.load(*place), float(HUGE))
                works[at] = max(works[at], self.known[key])
        return works

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
