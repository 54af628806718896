"""Chains that fit ranks of several stages: what each rank holds and takes so far goes along with the cuts.

A rank's stages share its memory and its time, so what is left for the next one hangs on where the others were
cut. A bound on all that is left to ``ranks``, single moves to ``moves``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from ..definition.answer import OutOfTime
from ..definition.contract import Contraction, merge
from ..definition.problem import HUGE, Array, Problem, scaled
from ..definition.relaxed import apart
from ..stopping import clock_s
from .intervals import Rows

__all__ = ["roomy_chain"]

_LOOKS = (1.1, 16), (1.3, 16), (2.0, 16)
"""Over a bound by so much, chains are looked for once one fits, with so many ways kept at each place."""

_ANY = 16, 128
"""So many are kept where none is known that fits."""

_FEW = 64
"""Of more items, or more than two for each stage, runs of them stay together."""

_CHAINS = 4
"""So many chains are given of each look, those first that leave most of all limits."""

_SIZES = 3
"""Up to so many sizes of the largest block that is computed again are looked at."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Ways:
    """Ways to go on from a place: what ranks then hold and take, where a stage ends, its way from there."""

    taken: Array
    end: Array
    then: Array


@dataclasses.dataclass(frozen=True, slots=True)
class _Choice:
    """What intervals from one start hold between, per microbatch and while acting, and the time they add."""

    still: Array
    kept: Array
    acting: Array
    again_ns: Array


def roomy_chain(
    problem: Problem, form: Problem, order: Sequence[int], lower_ns: int, until: float, deadline: float
) -> tuple[int, ...] | None:
    """A chain of an order that fits ``problem``; until then of loads near a bound, if one is found.

    ``form`` is the problem at prices and bytes that are a stage's own. What a rank holds at each moment of
    its schedule is summed over its stages, and so is its load; a parameter that two of them hold counts for
    both. Each stage keeps all that it saves, or computes blocks or itself again where it may. Only some ways
    to go on from a place are kept: O(items² · stages · ways) a look. None where none was found in time.
    """
    whole, places = _in_runs(form, order)
    room = _Room(whole.problem, places)

    def fitting(bound: int, n_kept: int, deadline: float) -> tuple[int, ...] | None:
        chains = map(whole.expand, room.chains(bound, n_kept, deadline))
        rated = ((problem.bottleneck(problem.loads(chain)), chain) for chain in chains)
        return min((row for row in rated if row[0] < HUGE), default=(HUGE, None))[1]

    best: tuple[int, ...] | None = None
    with contextlib.suppress(OutOfTime):
        best = next(filter(None, (fitting(HUGE - 1, n_kept, deadline) for n_kept in _ANY)), None)
        if best is not None:
            near = (fitting(round(lower_ns * over), n_kept, until) for over, n_kept in _LOOKS)
            best = next(filter(None, near), best)
    return best


def _in_runs(problem: Problem, order: Sequence[int]) -> tuple[Contraction, tuple[int, ...]]:
    """The problem with runs of an order together that may be in the same stages, each as much as others.

    And the order of the runs.
    """
    items = [problem.items[v] for v in order]
    most = max(_FEW, 2 * problem.n_stages)
    if len(items) <= most:
        return Contraction(problem, tuple(range(len(items)))), tuple(order)
    share = np.zeros(len(items))
    for name in ("work_ns", "static_bytes", "saved_bytes"):
        each = np.array([getattr(i, name) for i in items], dtype=np.float64)
        share += each / max(1.0, each.sum())
    run_of = np.floor(np.cumsum(share) * most / max(1.0, share.sum()))
    keys = ((x, i.first, i.last) for x, i in zip(run_of.tolist(), items, strict=True))
    rows = [
        [v for v, _ in row] for _, row in itertools.groupby(zip(order, keys, strict=True), lambda r: r[1])
    ]
    whole = merge(problem, rows)
    return whole, tuple(dict.fromkeys(whole.part_of[v] for v in order))


class _Room:
    """A column for each moment of each rank and one for its load, and what intervals of items take there."""

    def __init__(self, problem: Problem, order: Sequence[int]) -> None:
        self.problem, self.order = problem, order
        self.columns: dict[int, slice] = {}
        self.alive: dict[int, Array] = {}
        self.acts: dict[int, Array] = {}
        limits: list[int] = []
        for rank, own in problem.stages_of.items():
            first = problem.stages[own[0]]
            moments = [((first.in_flight,), 0)] if len(own) == 1 else problem.moments_of(rank)
            for y, s in enumerate(own):
                self.columns[s] = slice(len(limits), len(limits) + len(moments) + 1)
                self.alive[s] = np.array([alive[y] for alive, _ in moments], dtype=np.int64)
                self.acts[s] = np.array([acting == y for _, acting in moments], dtype=np.int64)
            limits += [*[first.limit_bytes] * len(moments), HUGE]
        self.limits = np.array(limits, dtype=np.int64)
        roomy = tuple(dataclasses.replace(s, limit_bytes=HUGE - 1) for s in problem.stages)
        free = dataclasses.replace(problem, stages=roomy, recompute="never")
        self.rows = Rows(apart(free, limited=True), order)
        self.sizes = self._sizes()

    def _sizes(self) -> list[tuple[Array, Array, Array]]:
        """By the largest size computed again: forward and bytes given up so far, each item's largest."""
        items = [self.problem.items[v] for v in self.order]
        sizes = sorted({b.saved_bytes for i in items for b in i.blocks}) if self.problem.has_blocks else []
        out = []
        for size in {sizes[-1 - x * len(sizes) // _SIZES] for x in range(_SIZES)} if sizes else ():
            blocks = [[b for b in i.blocks if b.saved_bytes <= size] for i in items]
            forward, freed = (
                np.cumsum([0, *(sum(getattr(b, name) for b in row) for row in blocks)])
                for name in ("forward_ns", "freed_bytes")
            )
            largest = np.array([max((b.saved_bytes for b in row), default=0) for row in blocks])
            out.append((forward, freed, largest))
        return out

    def chains(self, bound: int, n_kept: int, deadline: float) -> list[tuple[int, ...]]:
        """Chains with every rank's load within the bound, with so many ways to go on kept at each place."""
        n, k = self.rows.n, self.problem.n_stages
        limits = np.where(self.limits == HUGE, bound, self.limits)
        rest: list[list[_Ways | None]] = [[None] * (n + 1) for _ in range(k + 1)]
        none = np.zeros(1, dtype=np.int64)
        for s in range(k + 1) if self.problem.allow_empty else (k,):
            rest[s][n] = _Ways(np.zeros((1, len(limits)), dtype=np.int64), none + n, none)
        for i, stages, ends, loads in self.rows.descend(min(bound, HUGE - 1)):
            choices = self._choices(i, ends)
            for s in range(stages.stop - 1, stages.start - 1, -1):
                if clock_s() > deadline:
                    raise OutOfTime
                load = loads[s - stages.start]
                rest[s][i] = self._joined(s, i, ends.start, load, choices, rest[s + 1], limits, n_kept)
        first = rest[0][0]
        return [] if first is None else [self._chain(rest, x) for x in range(min(_CHAINS, len(first.end)))]

    def _choices(self, i: int, ends: slice) -> list[_Choice]:
        """What a stage from ``i`` may hold, by what it computes again."""
        static, saved, workspace, received, sent = self.rows._memory(i, ends)
        still = static + 2 * received + sent
        forward = self.rows.forward
        whole = _Choice(still, received, workspace + saved, forward[ends] - forward[i])
        if self.problem.recompute == "always":
            return [whole]
        out = [_Choice(still, saved, workspace, np.zeros_like(still))]
        for forward, freed, largest in self.sizes:
            redone = np.maximum.accumulate(largest[i : ends.stop - 1])[ends.start - i - 1 :]
            kept = saved - freed[ends] + freed[i]
            out.append(_Choice(still, kept, workspace + redone, forward[ends] - forward[i]))
        return out if self.problem.recompute == "never" else [*out, whole]

    def _joined(
        self,
        s: int,
        i: int,
        first: int,
        load: Array,
        choices: Sequence[_Choice],
        after: Sequence[_Ways | None],
        limits: Array,
        n_kept: int,
    ) -> _Ways | None:
        """The ways from ``i`` on with stage ``s`` first there, from those of the stages after it."""
        may_end = np.flatnonzero(load < HUGE)
        follow = [(x, ways) for x in may_end.tolist() if (ways := after[first + x]) is not None]
        found: list[_Ways] = []
        if self.problem.allow_empty and (ways := after[i]) is not None:
            found.append(_Ways(ways.taken, np.full(len(ways.end), i), np.arange(len(ways.end))))
        if follow:
            lengths = [len(ways.end) for _, ways in follow]
            place = np.repeat([x for x, _ in follow], lengths)
            taken = np.concatenate([ways.taken for _, ways in follow])
            then = np.concatenate([np.arange(m) for m in lengths])
            columns, speed = self.columns[s], self.problem.stages[s].speed
            for choice in choices:
                held = choice.still[:, None] + choice.kept[:, None] * self.alive[s]
                held += choice.acting[:, None] * self.acts[s]
                more = np.column_stack([held, np.minimum(load, HUGE) + scaled(choice.again_ns, speed)])
                total = taken.copy()
                total[:, columns] += more[place]
                fits = (total[:, columns] <= limits[columns]).all(axis=1)
                found.append(_Ways(total[fits], first + place[fits], then[fits]))
        return self._best(s, found, limits, n_kept)

    def _best(self, s: int, found: Sequence[_Ways], limits: Array, n_kept: int) -> _Ways | None:
        """Of the ways found, those that leave most where stages are still to come, and some unlike them."""
        if not any(len(ways.end) for ways in found):
            return None
        taken, end, then = (
            np.concatenate([getattr(ways, name) for ways in found]) for name in ("taken", "end", "then")
        )
        full = taken / np.maximum(limits, 1)
        ranks = {self.columns[t].start: self.columns[t] for t in range(s)} or {0: slice(None)}
        by_rank = np.stack([full[:, columns].max(axis=1) for columns in ranks.values()], axis=1)
        best = np.lexsort((by_rank.sum(axis=1), by_rank.max(axis=1)))
        if len(best) > n_kept:
            best, others = best[: n_kept // 2], best[n_kept // 2 :]
            others = others[np.argsort(by_rank[others, 0], kind="stable")]
            spread = np.linspace(0, len(others) - 1, n_kept - n_kept // 2).astype(np.int64)
            best = np.concatenate([best, others[spread]])
        return _Ways(taken[best], end[best], then[best])

    def _chain(self, rest: Sequence[Sequence[_Ways | None]], x: int) -> tuple[int, ...]:
        """The stage of each item on one way from the first item on."""
        stage_of, i = [0] * self.rows.n, 0
        for s in range(self.problem.n_stages):
            ways = rest[s][i]
            if ways is None:
                break
            stop, x = int(ways.end[x]), int(ways.then[x])
            for place in range(i, stop):
                stage_of[self.order[place]] = s
            i = stop
        return tuple(stage_of)
