"""Loops of any number of stages a rank: a bound from weighed ranks, and a proof by what each rank may hold.

A chain is a path from stage to stage through the graph's downsets, and a rank's load the sum of its stages'.
With weights on the ranks that add up to one, the lightest path's weighted sum is a bound on the fullest rank;
the best weights are looked for (the Lagrangian dual of a path with limited resources: Beasley and
Christofides, Networks 19, 1989). Steps that no better path takes are dropped, and the paths of those left are
followed stage by stage, of all that come to the same place with the same on every rank only one (labels:
Irnich and Desaulniers, "Shortest Path Problems with Resource Constraints", 2005). Memory is one more thing
that each moment of a rank's schedule holds. Two stages a rank are left to ``virtual``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..definition.answer import OutOfTime
from ..definition.blocks import UNDER
from ..definition.problem import HUGE, Array, Problem, memory_bytes, scaled, stage_ns
from ..stopping import clock_s
from .spans import Spans

__all__ = ["Found", "Paths"]

Floats = npt.NDArray[np.float64]

_ROUNDS = 80
"""How often the weights are moved."""

_STEPS = 8
"""The first bound tried is the lower one and this part of the way to the best known."""

_LABELS = 200_000
"""The most labels that are followed under one bound."""

_COMPARED = 256
"""With so many labels of its place each label is compared, the lightest of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A bottleneck that no chain beats, and assignments met on the way, best last."""

    lower_ns: int
    assignments: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Side:
    """Weights on the ranks; per stage and downset, the least weighted sum of what follows and precedes."""

    weights: Floats
    ahead: list[Floats]
    behind: list[Floats]


class Paths:
    """The chains of a problem through its downsets, priced at most as high as they are.

    Values that might stay on a rank are free, and so is what ranks synchronise; a tied parameter takes no
    memory.
    """

    def __init__(self, problem: Problem, sets: Sequence[int]) -> None:
        self.problem = p = _apart(problem)
        self.spans = spans = Spans(p, sets)
        self.full, self.k = spans.n - 1, p.n_stages
        self.ranks = sorted(p.stages_of)
        self.rank_of = [self.ranks.index(s.rank) for s in p.stages]
        made: dict[object, Array] = {}
        self.tables = [made.setdefault(*self._table(s)) for s in range(self.k)]
        self.limits = self._limits()

    def _table(self, s: int) -> tuple[object, Array]:
        """What stage ``s`` costs from each downset to each other, and what tells its table from others."""
        p, stage = self.problem, self.problem.stages[s]
        barred = tuple(v for v, (first, last) in enumerate(p.windows) if not first <= s <= last)
        forward = scaled(self.spans.forward, stage.speed)
        work = forward * (1 + (p.recompute == "always")) + scaled(self.spans.backward, stage.speed)
        loads = stage_ns(work, self.spans.moving[stage.links], 0 * work, p.overlap)
        return (stage.speed, stage.links, barred), np.where(self.spans.may_hold(s), loads, HUGE)

    def _limits(self) -> list[tuple[int, tuple[int, ...], int, int]]:
        """Per moment of a rank: the rank, microbatches alive in its stages, which of them acts, its limit.

        Recomputation that is free lets a rank fit, so memory then limits nothing here.
        """
        p, out = self.problem, []
        for x, rank in enumerate(self.ranks):
            limit = p.stages[p.stages_of[rank][0]].limit_bytes
            if limit < HUGE and p.recompute != "auto":
                out += [(x, alive, acting, limit) for alive, acting in p.moments_of(rank)]
        return out

    def search(self, known_ns: int, lower_ns: int, deadline: float) -> Found:
        """What bounds the problem, given an answer and a bound; proved where that is at least as much."""
        dual, weights, met = self._dual(known_ns, deadline)
        lower = max(dual, lower_ns)
        if lower >= known_ns or clock_s() > deadline:
            return Found(lower, tuple(met))
        evenly = np.full(len(self.ranks), 1 / len(self.ranks))
        sides = [_Side(w, self._ahead(w), self._behind(w)) for w in (weights, evenly)]
        top = min(known_ns, int(sum(t[t < HUGE].max(initial=0) for t in self.tables)) + 1)
        step = max(1, (top - lower) // _STEPS)
        try:
            while lower < top:
                bound = min(top - 1, lower + step)
                path = self._labels(bound, sides, deadline)
                if path is not None:
                    met.append(self._assignment(path))
                    return Found(int(self._loads(path).max()), tuple(met))
                lower, step = bound + 1, 2 * step
        except OutOfTime:
            return Found(lower, tuple(met))
        return Found(HUGE if top < known_ns else known_ns, tuple(met))

    def _dual(self, known_ns: int, deadline: float) -> tuple[int, Floats, list[tuple[int, ...]]]:
        """The best bound that weights on the ranks give, those weights, and paths light under some."""
        n = len(self.ranks)
        weights = best = np.full(n, 1 / n)
        value, met, scale = -1.0, dict[tuple[int, ...], None](), 1.0
        goal: float = known_ns
        for _ in range(_ROUNDS):
            ahead = self._ahead(weights)
            now = float(ahead[0][0])
            if now >= HUGE:
                # no path at all: pins leave none
                return 0, weights, []
            if now > value:
                value, best = now, weights
            else:
                scale *= 0.8
            path = self._lightest(weights, ahead)
            met[path] = None
            loads = self._loads(path)
            slope = loads - now
            if known_ns >= HUGE:
                goal = min(goal, float(loads.max()))
            if now >= known_ns - 1 or not slope.any() or clock_s() > deadline:
                break
            step = scale * max(goal - now, 1.0) / float(slope @ slope)
            weights = _on_simplex(weights + step * slope)
        return max(0, math.ceil(value * UNDER)), best, [self._assignment(path) for path in met]

    def _ahead(self, weights: Floats) -> list[Floats]:
        """Per stage and downset, the least weighted sum of what is still to come."""
        after = np.full(self.full + 1, float(HUGE))
        after[self.full] = 0.0
        out = [after]
        for s in reversed(range(self.k)):
            totals = self.tables[s] * weights[self.rank_of[s]] + out[-1]
            totals[self.tables[s] >= HUGE] = HUGE
            out.append(np.minimum(totals.min(axis=1), HUGE))
        return out[::-1]

    def _lightest(self, weights: Floats, ahead: Sequence[Floats]) -> tuple[int, ...]:
        """The downsets of the path with the least weighted sum."""
        path = [0]
        for s in range(self.k):
            row = self.tables[s][path[-1]]
            totals = np.where(row < HUGE, row * weights[self.rank_of[s]] + ahead[s + 1], np.inf)
            path.append(int(totals.argmin()))
        return tuple(path)

    def _loads(self, path: Sequence[int]) -> Floats:
        loads = np.zeros(len(self.ranks))
        for s, (i, j) in enumerate(itertools.pairwise(path)):
            loads[self.rank_of[s]] += self.tables[s][i, j]
        return loads

    def _assignment(self, path: Sequence[int]) -> tuple[int, ...]:
        stage_of = np.zeros(len(self.problem.items), dtype=np.int64)
        for s, (i, j) in enumerate(itertools.pairwise(path)):
            stage_of[self.spans.holds[j] & ~self.spans.holds[i]] = s
        return tuple(stage_of.tolist())

    def _labels(self, bound: int, sides: Sequence[_Side], deadline: float) -> tuple[int, ...] | None:
        """The path with the least bottleneck of those within the bound; None where none is.

        Raises :class:`OutOfTime` where there is too much to follow.
        """
        most = float(bound)
        nothing = (0,) * len(self.ranks), (0,) * len(self.limits)
        layers: list[dict[Label, Label | None]] = [{(0, *nothing): None}]
        followed = 0
        for s in range(self.k):
            layer: dict[Label, Label | None] = {}
            ends = self._ends(s, sides, most)
            held = self._held(s)
            for label in layers[-1]:
                for j, load in ends.get(label[0], ()):
                    there = self._then(label, s, j, load, held)
                    if there is None or there in layer or self._is_over(there, s + 1, sides, most):
                        continue
                    layer[there] = label
                    followed += 1
                if followed > _LABELS or clock_s() > deadline:
                    raise OutOfTime
            layers.append(_undominated(layer))
        if not layers[-1]:
            return None
        end = min(layers[-1], key=lambda label: (max(label[1]), label))
        path, label = [end[0]], end
        for layer in reversed(layers[1:]):
            before = layer[label]
            assert before is not None
            path.append(before[0])
            label = before
        return tuple(path[::-1])

    def _ends(self, s: int, sides: Sequence[_Side], most: float) -> dict[int, list[tuple[int, int]]]:
        """By start, the ends of stage ``s`` that a better path may take, with its load."""
        table = self.tables[s]
        may = table <= most
        for side in sides:
            own = table * side.weights[self.rank_of[s]]
            may &= (side.behind[s][:, None] + own + side.ahead[s + 1]) * UNDER <= most
        out: dict[int, list[tuple[int, int]]] = {}
        for i, j in zip(*np.nonzero(may), strict=True):
            out.setdefault(int(i), []).append((int(j), int(table[i, j])))
        return out

    def _behind(self, weights: Floats) -> list[Floats]:
        """Per stage and downset, the least weighted sum of the stages before it."""
        first = np.full(self.full + 1, float(HUGE))
        first[0] = 0.0
        out = [first]
        for s in range(self.k - 1):
            totals = out[-1][:, None] + self.tables[s] * weights[self.rank_of[s]]
            out.append(np.minimum(np.where(self.tables[s] < HUGE, totals, HUGE).min(axis=0), HUGE))
        return out

    def _held(self, s: int) -> list[tuple[int, Array, int]]:
        """For each moment of the stage's rank: its place, what the stage adds to it, its limit."""
        p, own = self.problem, self.problem.stages_of[self.problem.stages[s].rank]
        out = []
        for m, (x, alive, acting, limit) in enumerate(self.limits):
            if x != self.rank_of[s]:
                continue
            place, again = own.index(s), p.recompute == "always"
            static, saved, workspace, received, sent = self.spans.bytes_of
            parts = static, saved, workspace * (acting == place), received, sent
            kept, redone = memory_bytes(alive[place], *parts)
            if again:
                redone = redone - saved * (acting != place)
            out.append((m, redone if again else kept, limit))
        return out

    def _then(
        self, label: Label, s: int, j: int, load: int, held: Sequence[tuple[int, Array, int]]
    ) -> Label | None:
        """The label after stage ``s`` ends at ``j``; None where memory is short."""
        i, loads, moments = label
        rank = self.rank_of[s]
        if held:
            rows = list(moments)
            for m, bytes_of, limit in held:
                rows[m] += int(bytes_of[i, j])
                if rows[m] > limit:
                    return None
            moments = tuple(rows)
        return j, (*loads[:rank], loads[rank] + load, *loads[rank + 1 :]), moments

    def _is_over(self, label: Label, s: int, sides: Sequence[_Side], most: float) -> bool:
        """Whether no end of a label stays under what is known."""
        at, loads, _ = label
        return max(loads) > most or any(
            (float(side.weights @ loads) + side.ahead[s][at]) * UNDER > most for side in sides
        )


Label = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Where a path has come to, what each rank is loaded with, and what each moment holds."""


def _undominated(layer: dict[Label, Label | None]) -> dict[Label, Label | None]:
    """The labels that none at the same place is at most as much as in everything, lightest first."""
    by_place: dict[int, list[Label]] = {}
    for label in layer:
        by_place.setdefault(label[0], []).append(label)
    out: dict[Label, Label | None] = {}
    for labels in by_place.values():
        labels.sort(key=lambda label: (sum(label[1]), label))
        rows = np.array([[*loads, *moments] for _, loads, moments in labels])
        kept: list[int] = []
        for x, row in enumerate(rows):
            if not kept or not (rows[kept[:_COMPARED]] <= row).all(axis=1).any():
                kept.append(x)
        out |= {labels[x]: layer[labels[x]] for x in kept}
    return out


def _on_simplex(weights: Floats) -> Floats:
    """The nearest weights that are not negative and add up to one (Held, Wolfe and Crowder, 1974)."""
    falling = np.sort(weights)[::-1]
    over = (np.cumsum(falling) - 1) / np.arange(1, len(weights) + 1)
    last = int(np.flatnonzero(falling > over)[-1])
    out: Floats = np.maximum(weights - over[last], 0.0)
    return out


def _apart(problem: Problem) -> Problem:
    """The problem where what might depend on other stages of a rank costs nothing.

    Of a value's takers those stay that cannot be on its maker's rank but in its stage: too few items may lie
    between the two to fill the stages from one of a rank's to its next.
    """
    rows = problem.stages_of.values()
    least = min((b - a for own in rows for a, b in itertools.pairwise(own)), default=problem.n_stages) - 1
    if problem.allow_empty:
        least = 0
    above, below = problem.above, problem.below
    real = sum(1 << v for v, i in enumerate(problem.items) if i.ops)

    def is_near(u: int, v: int) -> bool:
        return (real & ~above[u] & ~below[v] & ~(1 << v | 1 << u)).bit_count() < least

    nets = []
    for net in problem.nets:
        near = tuple(v for v in net.consumers if is_near(net.producer, v))
        if near == net.consumers:
            nets.append(net)
            continue
        # all takers keep their buffers; only the near ones are sure to pay
        free = tuple((0, 0) for _ in net.link_ns)
        nets.append(dataclasses.replace(net, send_ns=0, receive_ns=0, link_ns=free))
        if near:
            nets.append(dataclasses.replace(net, consumers=near).without_bytes())
    shares = tuple(
        dataclasses.replace(s, sync_ns=0, more_ns=(), static_bytes=s.static_bytes * (not s.tied))
        for s in problem.shares
    )
    return dataclasses.replace(problem, nets=tuple(nets), shares=shares)
