"""Chains whose ranks hold several stages: first answers, then proofs where few downsets matter.

A rank's load is the sum of its stages'. With two of them, ranks are taken in turn and the state is where the
first stages have come to and where the second ones have: a V eats into the items from both ends, a loop goes
along two chains at once. Loops of more are left to ``paths``, what spans cost on one rank to ``spans``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from ..definition.answer import Answer, OutOfTime
from ..definition.problem import HUGE, Array, Problem, scaled
from ..definition.relaxed import all_received, apart, cheapest, holds_less
from ..lines.intervals import near_chain
from ..lines.moves import fitting, improve
from ..lines.orders import orders
from ..lines.reach import Bits
from ..lines.room import roomy_chain
from ..proof.bounds import lower_bound
from ..proof.packing import packed
from ..stopping import GRACE_S, clock_s
from .paths import Paths
from .recut import recut
from .spans import Spans, downsets, prefixes

__all__ = ["least_load", "several"]

_MOST_DOWNSETS = 700
"""Tables have the square of this many entries."""

_FITTING = 0.3
"""Share of the time spent on moving items until a first answer fits."""

_POLISHING = 0.1
"""Share of the time spent on a better first answer before the proof."""

_PAIRING = 0.75
"""Share of the time that pairs of spans get before paths, where ranks of a loop hold two stages."""


def several(problem: Problem, deadline: float) -> Answer:
    """The best assignment found where ranks hold several stages, and a load that none beats.

    Proved where the graph has few downsets, each rank holds two stages, laid as a V or a loop, or more in a
    loop, values go with the order of items and prices do not depend on what others hold (:func:`cheapest`);
    with many downsets the bound is :func:`least_load`.
    Stops at ``deadline`` or Ctrl-C with the best so far.
    """
    started = clock_s()
    cheap = _straight(cheapest(problem))
    received = _straight(cheapest(all_received(problem))) if holds_less(problem) else None
    known = Answer(None, HUGE, least_load(cheap if problem.has_hosts else problem))
    until = started + (deadline - started) * _FITTING
    try:
        if problem.has_memory:
            known = _in_room(problem, known, until, deadline)
        for order in orders(problem):
            known = _better(problem, known, _start(cheap, order, max(deadline, started + GRACE_S)))
            if known.stage_of is None and received is not None:
                known = _better(problem, known, _start(received, order, deadline))
            if clock_s() > deadline and known.stage_of is not None:
                return known
        until = clock_s() + (deadline - clock_s()) * _FITTING
        for order in orders(problem) if known.stage_of is None else ():
            known = _better(problem, known, fitting(problem, order, until))
            if known.stage_of is not None or clock_s() > until:
                break
        for known in _paired(problem, cheap, known, deadline):  # noqa: B007, B020
            pass
    except (OutOfTime, KeyboardInterrupt):
        pass
    return known


def _in_room(problem: Problem, known: Answer, until: float, deadline: float) -> Answer:
    """A chain of several orders that fits its ranks; until then, one near the bound is looked for.

    Where every value is received, what a stage holds is its own; where none is that may be made again, less.
    """
    forms = [cheapest(all_received(problem)), *([cheapest(problem)] if holds_less(problem) else [])]
    for form, order in itertools.product(forms, orders(problem)):
        known = _better(problem, known, roomy_chain(problem, form, order, known.lower_ns, until, deadline))
        if known.stage_of is not None or clock_s() > deadline:
            break
    return known


def _straight(problem: Problem) -> Problem:
    """The problem where what may flow against the order of items costs nothing."""
    edges = set(problem.edges)
    nets = (n for n in problem.nets if all((n.producer, v) in edges for v in n.consumers))
    return dataclasses.replace(problem, nets=tuple(nets))


def least_load(problem: Problem) -> int:
    """A bound on the fullest rank's load: a fair share of all that must be paid, whole items, the dearest."""
    speeds = {s.rank: s.speed for s in problem.stages}
    if set(speeds.values()) == {1.0}:
        again = problem.recompute == "always"
        whole = packed([i.work_ns + again * i.forward_ns for i in problem.items], len(speeds))
        total_ns = problem.total_ns + again * sum(i.forward_ns for i in problem.items)
        total_ns += _least_transfers(cheapest(problem))
        return max(problem.dearest_ns, whole, -(-total_ns // len(speeds)))
    return max(problem.dearest_ns, math.floor(problem.total_ns / sum(speeds.values())) - problem.n_stages)


def _least_transfers(problem: Problem) -> int:
    """What all stages together send and receive at least, where the items are a line.

    Then some value crosses every cut between neighbouring items, and so between stages on different ranks.
    """
    if problem.overlap or problem.allow_empty:
        return 0
    price: dict[int, int] = {}
    edges = set(problem.edges)
    for net in problem.nets:
        if net.producer + 1 in net.consumers and (net.producer, net.producer + 1) in edges:
            price[net.producer] = price.get(net.producer, 0) + net.send_ns + net.receive_ns
    ranks = [s.rank for s in problem.stages]
    n_cuts = sum(a != b for a, b in itertools.pairwise(ranks))
    if len(price) < len(problem.items) - 1:
        return 0
    return sum(sorted(price.values())[:n_cuts])


def _start(problem: Problem, order: Sequence[int], deadline: float) -> tuple[int, ...] | None:
    """The best chain of an order with every stage on a rank of its own."""
    own = apart(problem, limited=True)
    found = near_chain(own, order, lower_bound(own), deadline)
    return found[1] if found else None


def _better(problem: Problem, known: Answer, stage_of: Sequence[int] | None) -> Answer:
    if stage_of is None:
        return known
    value = problem.bottleneck(problem.loads(stage_of))
    if value >= HUGE or value >= known.bottleneck_ns:
        return known
    return Answer(tuple(stage_of), value, known.lower_ns)


def _paired(problem: Problem, cheap: Problem, known: Answer, deadline: float) -> Iterator[Answer]:
    """Ever better answers from pairs of spans: over every downset where they are few, else single orders."""
    if clock_s() > deadline:
        return
    layout = _Layout.of(problem)
    sets = downsets(cheap, _MOST_DOWNSETS)
    if sets is not None:
        now = clock_s()
        known = _polished(problem, known, now + (deadline - now) * _POLISHING)
        yield known
        if layout:
            until = deadline if layout.is_v else now + (deadline - now) * _PAIRING
            known = _proved(problem, cheap, layout, sets, known, until)
            yield known
        if not known.proved and not (layout and layout.is_v):
            yield _weighed(problem, cheap, sets, known, deadline)
        return
    if layout and len(problem.items) < _MOST_DOWNSETS:
        for order in orders(problem):
            spans = Spans(cheap, prefixes(order))
            found = _Pairs(spans, layout, min(known.bottleneck_ns, HUGE) - 1, deadline).best()
            known = _better(problem, known, found and found[1])
            yield known
    yield _polished(problem, known, deadline)


def _weighed(problem: Problem, cheap: Problem, sets: Sequence[int], known: Answer, deadline: float) -> Answer:
    """What paths through the downsets add: better answers, and a bound on all."""
    found = Paths(cheap, sets).search(known.bottleneck_ns, known.lower_ns, deadline)
    for stage_of in found.assignments:
        known = _better(problem, known, stage_of)
    return dataclasses.replace(known, lower_ns=max(known.lower_ns, min(found.lower_ns, known.bottleneck_ns)))


def _polished(problem: Problem, known: Answer, deadline: float) -> Answer:
    """Runs of stages cut anew and single items moved, in turn, until neither helps."""
    before = HUGE + 1
    while known.stage_of is not None and known.lower_ns < known.bottleneck_ns < before:
        before = known.bottleneck_ns
        for better in (recut, improve):
            known = _better(problem, known, better(problem, known.stage_of or (), deadline))
    return known


def _proved(
    problem: Problem, cheap: Problem, layout: _Layout, sets: Sequence[int], known: Answer, deadline: float
) -> Answer:
    """Bounds between what is certain and what is known in turn, as ``exact.prove`` does."""
    spans, lower = Spans(cheap, sets), known.lower_ns
    try:
        for part in (16, 4, 1):
            if known.bottleneck_ns <= lower:
                break
            bound = lower + (known.bottleneck_ns - 1 - lower) // part
            found = _Pairs(spans, layout, bound, deadline).best()
            if found is not None:
                known = _better(problem, known, found[1])
                lower = found[0]
                break
            lower = bound + 1
    except OutOfTime:
        # what is known so far stands, with the last bound that failed
        pass
    return dataclasses.replace(known, lower_ns=min(lower, known.bottleneck_ns))


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """The stages of each rank, ranks in the order of their first: one or two each, as a V or a loop."""

    stages: tuple[tuple[int, ...], ...]
    is_v: bool

    @classmethod
    def of(cls, problem: Problem) -> _Layout | None:
        own = tuple(problem.stages_of.values())
        n_ranks, k = len(own), problem.n_stages
        if k > 2 * n_ranks or tuple(o[0] for o in own) != tuple(range(n_ranks)):
            return None
        seconds = [o[1] if len(o) > 1 else None for o in own]
        for is_v in (True, False):
            places = (2 * n_ranks - 1 - r if is_v else n_ranks + r for r in range(n_ranks))
            if seconds == [s if s < k else None for s in places]:
                return cls(own, is_v)
        return None


class _Pairs:
    """The least bottleneck of a layout whose ranks all stay within a bound."""

    def __init__(self, spans: Spans, layout: _Layout, bound: int, deadline: float) -> None:
        self.spans, self.layout, self.bound, self.deadline = spans, layout, bound, deadline
        self.problem, self.full = spans.problem, spans.n - 1
        self.may = [spans.may_hold(s) for s in range(self.problem.n_stages)]
        for own in layout.stages:
            for s in own:
                self.may[s] &= self._work_of(own[0]) <= bound
        self.room = [self._room(r) for r in range(len(layout.stages))]

    def _work_of(self, s: int) -> Array:
        speed = self.problem.stages[s].speed
        return scaled(self.spans.forward, speed) + scaled(self.spans.backward, speed)

    def _room(self, r: int) -> int:
        """The most work that the ranks after the first ``r`` + 1 can hold."""
        speeds = [self.problem.stages[own[0]].speed for own in self.layout.stages[r + 1 :]]
        return sum(self.bound if f == 1.0 else math.floor((self.bound + 2) * f) for f in speeds)

    def best(self) -> tuple[int, tuple[int, ...]] | None:
        """The least bottleneck and its assignment; None where none is within the bound."""
        if self.layout.is_v:
            return self._from(self.full, None)
        best: tuple[int, tuple[int, ...]] | None = None
        for middle in range(0 if self.problem.allow_empty else 1, self.full + 1):
            found = self._from(middle, middle)
            if found is not None:
                best, self.bound = found, found[0] - 1
                self.room = [self._room(r) for r in range(len(self.layout.stages))]
        return best

    def _from(self, q: int, middle: int | None) -> tuple[int, tuple[int, ...]] | None:
        """From a state where nothing is placed; ``middle`` is where a loop's second round starts."""
        layers: list[dict[tuple[int, int], tuple[int, tuple[int, int]]]] = [{(0, q): (0, (0, q))}]
        for r in range(len(self.layout.stages)):
            layer: dict[tuple[int, int], tuple[int, tuple[int, int]]] = {}
            for state, (value, _) in sorted(layers[-1].items()):
                if clock_s() > self.deadline:
                    raise OutOfTime
                for there, load in self._moves(r, state, middle):
                    worst = max(value, load)
                    if there not in layer or worst < layer[there][0]:
                        layer[there] = worst, state
            if not layer:
                return None
            layers.append(layer)
        end = min(layers[-1], key=lambda state: (layers[-1][state][0], state))
        return layers[-1][end][0], self._assignment(layers, end)

    def _moves(
        self, r: int, state: tuple[int, int], middle: int | None
    ) -> Iterator[tuple[tuple[int, int], int]]:
        """The states that rank ``r`` may lead to, with its load."""
        own, (p, q) = self.layout.stages[r], state
        first = np.flatnonzero(self.may[own[0]][p])
        if len(own) == 1:
            second = np.array([q])
        else:
            ahead = self.may[own[1]][:, q] if middle is None else self.may[own[1]][q]
            second = np.flatnonzero(ahead)
        first, second = self._open(r, first, second, middle)
        if not len(first) or not len(second):
            return
        still = np.full(len(second), q)
        spans = (second, still) if middle is None else (still, second)
        loads, bound_only = self.spans.loads(own, (p, first), spans)
        loads[~self._can_end(r, first, second, middle)] = HUGE
        for x, y in zip(*np.nonzero(loads <= self.bound), strict=True):
            there, load = (int(first[x]), int(second[y])), int(loads[x, y])
            if bound_only[x, y]:
                load = self._load(own, state, there)
            if load <= self.bound:
                yield there, load

    def _load(self, own: Sequence[int], state: tuple[int, int], there: tuple[int, int]) -> int:
        """What a rank's stages cost between two states, with the blocks they compute again."""
        p = self.problem
        stage_of = np.full(len(p.items), next((s for s in range(p.n_stages) if s not in own), own[0]))
        for s, (i, j) in zip(own, self._spans(state, there), strict=False):
            stage_of[self.spans.holds[j] & ~self.spans.holds[i]] = s
        loads = p.loads(stage_of.tolist())
        held = [loads[s] for s in own]
        short = p.rank_bytes(p.stages[own[0]].rank, held) > p.stages[own[0]].limit_bytes
        return HUGE if short else sum(load.load_ns for load in held)

    def _spans(self, state: tuple[int, int], there: tuple[int, int]) -> list[tuple[int, int]]:
        """The starts and ends of a rank's spans, from one state to the next."""
        second = (there[1], state[1]) if self.layout.is_v else (state[1], there[1])
        return [(state[0], there[0]), second]

    def _open(self, r: int, first: Array, second: Array, middle: int | None) -> tuple[Array, Array]:
        """The ends that the last rank must meet."""
        if r + 1 < len(self.layout.stages):
            return first, second
        if middle is None:
            both = np.intersect1d(first, second)
            return both, both
        return first[first == middle], second[second == self.full]

    def _can_end(self, r: int, first: Array, second: Array, middle: int | None) -> Bits:
        """Whether the ranks that follow can take what is left, which must lie between the two ends."""
        work, inside = self.spans.work, self.spans.within
        is_last = r + 1 == len(self.layout.stages)
        a, b = first[:, None], second[None, :]
        if middle is None:
            left = work[b] - work[a]
            open_still = (a == b) if is_last else inside[a, b]
        else:
            left = work[middle] - work[a] + work[self.full] - work[b]
            open_still = inside[a, middle] | is_last
        return np.asarray(open_still & (left <= self.room[r]))

    def _assignment(
        self, layers: Sequence[dict[tuple[int, int], tuple[int, tuple[int, int]]]], end: tuple[int, int]
    ) -> tuple[int, ...]:
        stage_of = [0] * len(self.problem.items)
        for r in range(len(self.layout.stages) - 1, -1, -1):
            own, start = self.layout.stages[r], layers[r + 1][end][1]
            for s, (i, j) in zip(own, self._spans(start, end), strict=False):
                for v in np.flatnonzero(self.spans.holds[j] & ~self.spans.holds[i]):
                    stage_of[v] = s
            end = start
        return tuple(stage_of)
