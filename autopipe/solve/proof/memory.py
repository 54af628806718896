"""What memory leaves: whether all ranks have room for everything, and what must be computed again for it.

A linear program of what each rank holds. Items may be divided among ranks there, but a cut between two stages
goes through at most one of a model's ``runs``: the others are on one rank each. The bound is taken from the
program's multipliers alone (weak duality), so it is one however exact HiGHS was. Bounds that know no memory
are left to ``bounds``.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..definition.blocks import UNDER
from ..definition.problem import HUGE, Problem
from ..stopping import clock_s
from .runs import Block, Kind, Run, runs_of

__all__ = ["least_in_room", "least_total_in_room", "part_with_room"]

Floats = npt.NDArray[np.float64]
Entries = list[tuple[int, float]]
"""Rows of one column, and its factors there."""

_NEAR = 1e-5
"""A bound is raised until it rises by less than this part of it."""
_ROUNDS = 20
"""At most so many times."""
_COLUMNS = 40_000
"""Larger programs are not solved: the bound then knows no memory."""
_SHARE = 0.2
"""Share of the time that is left for this at most: the rest is for looking for assignments."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Way:
    """One way for a rank to keep what backward needs, with the rows of its time and of its moments.

    A rank of one stage keeps it but for some blocks, or computes the whole stage again: one of two ways.
    ``again`` are the rows of the blocks that each of its stages may compute again.
    """

    rank: int
    stages: tuple[int, ...]
    kept: bool
    whole: bool
    time: int
    moments: tuple[int, ...]
    again: tuple[dict[Block, int], ...]


class _Program:
    """The program: as much of everything as ranks can hold, in the same part of each run.

    Rows are the kinds of each run, ways' times and moments, blocks of stages, and kinds of runs at cuts.
    Columns are the part, and what each stage holds and computes again. ``in_all``: bounds are of the sum of
    the times of ranks, which are of one speed, and not of each rank's time.
    """

    def __init__(self, problem: Problem, *, in_all: bool = False) -> None:
        self.problem, self.in_all = problem, in_all
        self.ranks = list(problem.stages_of)
        self.runs = list(collections.Counter(runs_of(problem)).items())
        self.n_columns, self.n_rows = 1, 0
        self.entries: list[tuple[int, int, float]] = []
        self.ways = [way for x in range(len(self.ranks)) for way in self._ways(x)]
        self.covered: list[list[int]] = []
        self.at_cuts: list[list[list[tuple[int, list[int]]]]] = []
        self.wholes: list[list[int]] = []
        self.ways_of: list[list[tuple[int, _Way]]] = [[] for _ in problem.stages]
        for w, way in enumerate(self.ways):
            for s in way.stages:
                self.ways_of[s].append((w, way))
        for run, count in self.runs:
            if self.is_large:
                break
            self._place(run, count)

    @property
    def is_large(self) -> bool:
        """Whether this is too much to solve, and so is not whole."""
        return self.n_columns > _COLUMNS

    def _row(self) -> int:
        self.n_rows += 1
        return self.n_rows - 1

    def _column(self, entries: Entries) -> int:
        self.entries += [(row, self.n_columns, value) for row, value in entries if value]
        self.n_columns += 1
        return self.n_columns - 1

    def _moments(self, x: int) -> Sequence[tuple[tuple[int, ...], int]]:
        own = self.problem.stages_of[self.ranks[x]]
        if len(own) == 1:
            return [((self.problem.stages[own[0]].in_flight,), 0)]
        return self.problem.moments_of(self.ranks[x])

    def _ways(self, x: int) -> Iterator[_Way]:
        p = self.problem
        own = p.stages_of[self.ranks[x]]
        kept, whole = p.recompute != "always", p.recompute != "never"
        moments = self._moments(x) if p.stages[own[0]].limit_bytes < HUGE else []
        blocks = sorted({(b.forward_ns, b.freed_bytes) for i in p.items for b in i.blocks})
        for choice in [(kept, False), (False, whole)] if len(own) == 1 else [(kept, whole)]:
            if not any(choice):
                continue
            again: list[dict[Block, int]] = []
            time_row, rows = self._row(), tuple(self._row() for _ in moments)
            for y in range(len(own)):
                again.append({})
                for block in blocks if choice[0] and p.has_blocks else ():
                    again[-1][block] = row = self._row()
                    freed = (-float(alive[y] * block[1]) for alive, _ in moments)
                    self._column([(row, 1.0), (time_row, block[0]), *zip(rows, freed, strict=True)])
            yield _Way(x, own, *choice, time_row, rows, tuple(again))

    def _holding(self, kind: Kind, s: int) -> Iterator[tuple[tuple[int, bool], Entries]]:
        """Each way in which stage ``s`` may hold an item of a kind, and what that takes."""
        for w, way in self.ways_of[s] if kind.first <= s <= kind.last else ():
            y, moments = way.stages.index(s), self._moments(way.rank)
            if way.kept:
                held = (kind.static_bytes + alive[y] * kind.saved_bytes for alive, _ in moments)
                again = collections.Counter(kind.blocks if way.again[y] else ())
                blocks = [(way.again[y][b], -float(n)) for b, n in again.items()]
                at = zip(way.moments, map(float, held), strict=False)
                yield (w, False), [(way.time, float(kind.work_ns)), *at, *blocks]
            if way.whole:
                held = (kind.static_bytes + kind.saved_bytes * (acts == y) for _, acts in moments)
                at = zip(way.moments, map(float, held), strict=False)
                yield (w, True), [(way.time, float(kind.work_ns + kind.forward_ns)), *at]

    def _place(self, run: Run, count: int) -> None:
        """Columns for a kind of run: on one stage as a whole, or its items on both sides of a cut."""
        rows = [self._row() for _ in run]
        self.entries += [(row, 0, float(count)) for row in rows]
        self.covered.append(rows)
        self.wholes.append([])
        self.at_cuts.append([])
        stages = range(self.problem.n_stages)
        for s in stages:
            ways = [dict(self._holding(kind, s)) for kind, _ in run]
            for way in ways[0].keys() & set.intersection(*({*w} for w in ways)):
                taken: collections.Counter[int] = collections.Counter()
                for (_, n), there in zip(run, ways, strict=True):
                    for row, value in there[way]:
                        taken[row] += n * value  # type: ignore[assignment]
                held = [(row, -1.0) for row in rows]
                self.wholes[-1].append(self._column([*held, *taken.items()]))
        if len(run) == 1 and run[0][1] == 1:
            return
        for cut in stages[:-1]:
            if self.is_large:
                return
            self.at_cuts[-1].append([])
            for (kind, n), row in zip(run, rows, strict=True):
                at = self._row()
                sides = [e for s in (cut, cut + 1) for _, e in self._holding(kind, s)]
                columns = [self._column([(row, -1.0 / n), (at, 1.0 / n), *e]) for e in sides]
                self.at_cuts[-1][-1].append((at, columns))

    @functools.cached_property
    def _matrix(self) -> Any:
        from scipy.sparse import coo_array

        rows, columns, values = zip(*self.entries, strict=True)
        return coo_array((values, (rows, columns)), shape=(self.n_rows, self.n_columns)).tocsr()

    def _most_ns(self, x: int, bound: int) -> float:
        """The most work of a rank, or of all, within a bound: a stage's sums are rounded three times."""
        own = self.problem.stages_of[self.ranks[x]]
        speed = self.problem.stages[own[0]].speed
        n_rounded = self.problem.n_stages if self.in_all else len(own)
        return float(bound) if speed == 1.0 else (bound + 2 * n_rounded) * speed

    def _limit(self, x: int) -> int:
        return self.problem.stages[self.problem.stages_of[self.ranks[x]][0]].limit_bytes

    def _multipliers(self, bound: int | None, seconds: float) -> Floats | None:
        """Those of rows where as much as possible is held within the bound, or with any time."""
        from scipy.optimize import linprog
        from scipy.sparse import coo_array, hstack, vstack

        scale = np.ones(self.n_rows)
        # beside: a share of its rank for each way, and of each cut for each kind of run
        beside: list[tuple[int, int, float]] = []
        totals: list[tuple[int, int, float]] = []
        n_beside = len(self.ways)
        for w, way in enumerate(self.ways):
            limit = self._limit(way.rank)
            scale[way.time] = 0.0 if bound is None else 1 / max(1.0, self._most_ns(way.rank, bound))
            scale[list(way.moments)] = 1 / max(1, limit)
            beside += [(row, w, -float(limit > 0)) for row in way.moments]
            beside += [(way.time, w, -1.0)] * (bound is not None and not self.in_all)
            totals.append((way.rank, w, 1.0))
        n_totals = len(self.ranks) + self.problem.n_stages - 1
        if self.in_all and bound is not None:
            beside += [(way.time, n_beside + w, -1.0) for w, way in enumerate(self.ways)]
            totals += [(n_totals, n_beside + w, 1.0) for w in range(len(self.ways))]
            n_totals += 1
            n_beside += len(self.ways)
        for cuts in self.at_cuts:
            for cut, places in enumerate(cuts):
                beside += [(row, n_beside, -1.0) for row, _ in places]
                totals.append((len(self.ranks) + cut, n_beside, 1.0))
                n_beside += 1

        def sparse(entries: Sequence[tuple[int, int, float]], shape: tuple[int, int]) -> Any:
            rows, columns, values = zip(*entries, strict=True)
            return coo_array((values, (rows, columns)), shape=shape).tocsr()

        top = hstack([self._matrix.multiply(scale[:, None]), sparse(beside, (self.n_rows, n_beside))])
        empty = coo_array((n_totals, self.n_columns))
        low = hstack([empty, sparse(totals, (n_totals, n_beside))])
        n = self.n_columns + n_beside
        found = linprog(
            np.concatenate([[-1.0], np.zeros(n - 1)]),
            A_ub=vstack([top, low]).tocsr(),
            b_ub=np.concatenate([np.zeros(self.n_rows), np.ones(n_totals)]),
            bounds=np.array([(0.0, 1.0)] + [(0.0, np.inf)] * (n - 1)),
            method="highs",
            options={"time_limit": max(0.01, seconds)},
        )
        if found.x is None or found.ineqlin is None:
            return None
        out: Floats = np.maximum(0.0, -found.ineqlin.marginals[: self.n_rows]) * scale
        return out

    def _weighed(self, multipliers: Floats) -> tuple[float, float]:
        """What all runs weigh at least, and what of that they may save where cuts go through them.

        Multipliers weigh rows; those of what a stage computes again are as large as they must be.
        """
        y = multipliers.copy()
        worth = [y[rows] for rows in self.covered]
        for rows in self.covered:
            y[rows] = 0.0
        for cuts in self.at_cuts:
            for places in cuts:
                y[[row for row, _ in places]] = 0.0
        # the columns of blocks are the first ones made, in the order of their rows
        blocks = [row for way in self.ways for again in way.again for row in again.values()]
        y[blocks] = 0.0
        weights = self._matrix.T @ y
        y[blocks] = np.maximum(0.0, -weights[1 : 1 + len(blocks)])
        weights = self._matrix.T @ y
        needed, saved = 0.0, np.zeros(self.problem.n_stages)
        for (run, count), each, wholes, cuts in zip(self.runs, worth, self.wholes, self.at_cuts, strict=True):
            total, least = float(each.sum()), float(weights[wholes].min(initial=np.inf))
            each = each * min(1.0, least / total) if total > 0 else each
            needed += count * float(each.sum())
            for cut, places in enumerate(cuts):
                parts = (
                    max(0.0, own - n * float(weights[columns].min(initial=np.inf)))
                    for own, (_, n), (_, columns) in zip(each, run, places, strict=True)
                )
                saved[cut] = max(saved[cut], sum(parts))
        return needed, float(saved.sum())

    def _there(self, multipliers: Floats, bound: int | None) -> float:
        """What ranks have room for at most, weighed by the same; times in all as the one that weighs most."""
        most = np.zeros(len(self.ranks))
        for way in self.ways:
            room = self._limit(way.rank) * float(multipliers[list(way.moments)].sum())
            if bound is not None and not self.in_all:
                room += self._most_ns(way.rank, bound) * float(multipliers[way.time])
            most[way.rank] = max(most[way.rank], room)
        shared = 0.0
        if bound is not None and self.in_all:
            shared = self._most_ns(0, bound) * max(float(multipliers[way.time]) for way in self.ways)
        return float(most.sum()) + shared

    def part(self, seconds: float) -> float:
        """At most this part of everything has room, with any time."""
        found = self._multipliers(None, seconds)
        if found is None:
            return 1.0
        needed, saved = self._weighed(found)
        return min(1.0, (self._there(found, None) + saved) / UNDER**2 / needed) if needed > 0 else 1.0

    def ruled_out(self, bound: int, most: int, seconds: float) -> int:
        """A bottleneck up to ``most`` that is ruled out, by what does so for ``bound``; −1 for none."""
        found = self._multipliers(bound, seconds)
        if found is None:
            return -1
        needed, saved = self._weighed(found)
        low, high = -1, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            is_out = self._there(found, middle) + saved < needed * UNDER**2
            low, high = (middle, high) if is_out else (low, middle)
        return low


def part_with_room(problem: Problem, deadline: float) -> float:
    """At most this part of everything has room, whatever is computed again; 1 where all of it may have.

    So limits of the same proportions must be larger by its inverse at least. Programs that are large are not
    solved, nor any made where an even share of everything has room on each rank.
    """
    if not problem.has_memory or _is_roomy(problem):
        return 1.0
    until, program = _until(deadline), _Program(problem)
    return 1.0 if program.is_large else program.part(until - clock_s())


def _until(deadline: float) -> float:
    now = clock_s()
    return now + _SHARE * max(0.0, deadline - now)


def _is_roomy(problem: Problem) -> bool:
    """Whether each rank has room for an even share of everything, could it be divided."""
    static, saved = (
        sum(getattr(part, name) for part in problem.parts) for name in ("static_bytes", "saved_bytes")
    )
    for rank, own in problem.stages_of.items():
        limit = problem.stages[own[0]].limit_bytes
        most = max(sum(alive) for alive, _ in problem.moments_of(rank))
        if problem.recompute == "always":
            most = 1
        if len(own) * static + most * saved > limit * problem.n_stages:
            return False
    return True


def least_in_room(problem: Problem, lower: int, most: int, deadline: float) -> int:
    """A bound on the bottleneck of every assignment that fits, at least ``lower`` and at most ``most``."""
    if not problem.has_memory:
        return lower
    return _raised(_Program(problem), lower, most, _until(deadline))


def least_total_in_room(problem: Problem, deadline: float) -> int:
    """A bound on the sum of the times of ranks where everything fits; they are of one speed."""
    # forwards and backwards of a stage are rounded
    total = int(sum(item.work_ns for item in problem.items) / problem.stages[0].speed) - 2 * problem.n_stages
    if problem.recompute == "never":
        return total
    return _raised(_Program(problem, in_all=True), total, HUGE, _until(deadline))


def _raised(program: _Program, lower: int, most: int, until: float) -> int:
    """The bound, by what programs rule out under it."""
    if program.is_large:
        return lower
    for _ in range(_ROUNDS):
        left = until - clock_s()
        if lower >= most or left <= 0:
            break
        out = program.ruled_out(lower, most - 1, left)
        before, lower = lower, max(lower, out + 1)
        if lower - before <= _NEAR * lower:
            break
    return lower
