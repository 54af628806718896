"""What a solve tries: schedules, stage counts, and orders of the ranks; each is one case.

Answering a case is left to ``search``, its integer problem to ``formulate``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from ...arguments import whole
from ...errors import InfeasibleError, InputError
from ...hardware import MOST_RANKS, Cluster
from ...schedule import BREADTH_FIRST, COST_AWARE, MOST_LISTED, NAMES, SPLIT, build, placement
from ..definition.problem import HUGE, Problem
from ..proof.memory import least_total_in_room
from ..proof.step import PRECISE, Line, least_step_ns
from .baselines import Weigh
from .formulate import formulate, largest_cut
from .options import Options
from .source import Source, cheapest_link
from .tails import tail_words

__all__ = ["SEVERAL_PER_RANK", "Case", "cases", "rank_orders"]

SEVERAL_PER_RANK = ("interleaved", "looped-bfs", "zbv", "dualpipev")
"""Schedules whose ranks hold two stages each unless told otherwise."""

IN_TURN = "1f1b"
"""The schedule whose ranks have at most a microbatch in flight for each stage from theirs on."""

_LISTED_S = 1e-3
"""Seconds for each forward of a schedule that is made for its costs, and made again once they are known."""

_FEW_RANKS = 8
"""Up to so many, every number of ranks is tried; beyond, those that double, and all of them."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One schedule and stage count to plan for; ``order`` is the ranks as stages take them.

    Stages are placed as the schedule places them on ranks 0, 1, …, which ``order`` then names. ``ranks`` are
    those of the cluster given that take part, in the source's own numbering.
    """

    source: Source
    schedule: str
    n_stages: int
    n_microbatches: int
    balance: str | Weigh
    order: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage."""
        slots = placement(self.schedule, self.source.cluster.n_ranks, self.n_stages)
        return tuple(self.order[slot] for slot in slots)

    @property
    def label(self) -> str:
        """What tells it from other cases."""
        moved = f", ranks {'-'.join(map(str, self.order))}" if list(self.order) != sorted(self.order) else ""
        return f"{self.schedule}, {self.n_stages} stages{moved}, {self.n_microbatches} microbatches"

    @property
    def is_possible(self) -> bool:
        """Whether the schedule can be built for its counts."""
        n_ranks = self.source.cluster.n_ranks
        try:
            if self.schedule == COST_AWARE:
                return len(self.placement) * self.n_microbatches <= MOST_LISTED
            build(self.schedule, n_ranks, self.n_stages, self.n_microbatches)
        except InputError:
            return False
        return True

    @property
    def making_s(self) -> float:
        """What making its schedule, and again for a plan, takes at least: one is listed by the clock."""
        return _LISTED_S * self.n_stages * self.n_microbatches * (self.schedule == COST_AWARE)

    @functools.cached_property
    def n_held(self) -> float:
        """Of how many microbatches a rank holds what one keeps in all stages, about: the least fits first."""
        n_ranks = self.source.cluster.n_ranks
        alive: tuple[int, ...] = (self.n_microbatches,)
        if self.schedule != COST_AWARE and self.is_possible:
            alive = build(self.schedule, n_ranks, self.n_stages, self.n_microbatches).in_flight
        return sum(alive) / len(alive) / n_ranks

    @property
    def least_step_s(self) -> float:
        """What no plan of this case can beat."""
        devices = self.source.cluster.devices
        least_ns = least_step_ns(
            self.source.work,
            [d.speed for d in devices],
            self.n_microbatches,
            in_line=self.n_stages == len(devices),
            split=self.schedule in (*SPLIT, COST_AWARE),
            line=self.line,
        )
        return self._step_s(least_ns)

    @property
    def line(self) -> Line | None:
        """The order that ranks keep, where it is known, they are alike, and each has a stage."""
        devices = self.source.cluster.devices
        is_known = self.schedule in (IN_TURN, BREADTH_FIRST[IN_TURN])
        if not is_known or self.n_stages != len(devices) or len({d.speed for d in devices}) > 1:
            return None
        cluster = self.source.cluster
        # of ranks that share a host's cores, messages may be copied by either
        hop_s = 0.0 if cluster.cores else 2 * cheapest_link(cluster).seconds(self.source.work.hop_bytes)
        return Line(len(devices), self.n_microbatches, self.schedule == IN_TURN, 1e9 * hop_s)

    @property
    def _pace(self) -> float:
        """A rank that has its host to itself is faster than its costs say, by this factor at most."""
        return min(1.0, self.source.costs.alone) if self.source.cluster.cores else 1.0

    def least_step_in_room_s(
        self, problem: Problem, fullest_ns: int, deadline: float, sums_ns: float = 0.0
    ) -> float:
        """The same, with what memory has computed again.

        The fullest stage works ``fullest_ns`` at least, and the largest of what bounds a step is ``sums_ns``
        where that is known: then nothing else is looked at.
        """
        line, work = self.line, self.source.work
        if line is None:
            return self.least_step_s
        least_ns = sums_ns or line.least_ns(
            least_total_in_room(problem, deadline),
            work.longer_ns / self.source.cluster.devices[0].speed,
            fullest_ns,
            self.aside_ns,
        )
        return max(self.least_step_s, self._step_s(least_ns * (1 - PRECISE)))

    @property
    def aside_ns(self) -> float:
        """The most that a rank of its line works which has no op of the path."""
        return self.source.work.aside_ns / self.source.cluster.devices[0].speed

    def _step_s(self, least_ns: float) -> float:
        """The step that takes so long at least once it has begun, at the pace of costs."""
        return self.source.costs.start_s + least_ns / 1e9 * self._pace

    def most_step_ns(self, step_s: float) -> float:
        """What the largest of the sums that bound a step may be where it is no longer than so."""
        return (step_s - self.source.costs.start_s) / self._pace * (1 + PRECISE) * 1e9

    def problem(self) -> Problem:
        """Its integer problem. Raises :class:`InfeasibleError` when the graph has too few pieces."""
        n_ranks, s = self.source.cluster.n_ranks, self.source
        schedule = build(self.schedule, n_ranks, self.n_stages, self.n_microbatches, placement=self.placement)
        problem = formulate(s, schedule)
        most = largest_cut(problem)
        if not most:
            raise InfeasibleError(
                f"{s.graph.model} computes nothing that a stage could hold: what it returns is made of its "
                "inputs as they are; split a model that has layers",
                finer_may_help=False,
            )
        if most < self.n_stages:
            pins = f" with the pins {s.settings.pin}" if s.settings.pin else ""
            tail = f": {words}" if (words := tail_words(s.graph, self.n_microbatches)) else ""
            raise InfeasibleError(
                f"{s.graph.model} can be cut into {most} stage{'s' * (most > 1)} at most{pins}, fewer than "
                f"n_stages={self.n_stages}{tail or s.bound_together(self.n_stages)}; "
                f"{'drop a pin' if pins else f'use n_stages={most}'}, or open a module that is now whole"
            )
        return problem


def cases(source: Source, asked: Options) -> list[Case]:
    """Every case to try, those that cannot be placed left out.

    With ``n_stages`` free, every number of ranks up to the cluster's is tried, from ``min_ranks`` on: the
    first so many, or where their order is free the fastest, and those with most room. Each has one stage, or
    two where the schedule is made for several; pins rule out counts without their stages. Raises
    :class:`InputError` for counts that are none.
    """
    free, n_microbatches = asked.n_stages in (None, "auto"), asked.n_microbatches
    wanted = 0 if free else whole("n_stages", asked.n_stages, most=MOST_RANKS, also="'auto'")
    min_ranks = whole("min_ranks", asked.min_ranks, most=source.cluster.n_ranks)
    needed = max((s + 1 if s >= 0 else -s for s in asked.pin.values()), default=1)
    names = _schedules(source, asked.schedule, n_microbatches)
    out = []
    for n_ranks in _rank_counts(source.cluster.n_ranks, min_ranks) if free else (source.cluster.n_ranks,):
        for ranks in _chosen(source, n_ranks) if asked.any_order else [tuple(range(n_ranks))]:
            there = source.on(ranks)
            order = tuple(range(n_ranks)) if asked.device_order == "given" else there.cluster.by_host
            for name in names:
                stages = wanted or n_ranks * (2 if name in SEVERAL_PER_RANK else 1)
                if free and stages < needed:
                    continue
                filled = there.filling(stages).cut_into(n_microbatches)
                out.append(Case(filled, name, stages, n_microbatches, asked.balance, order, ranks))
    return out


def _schedules(source: Source, asked: str, n_microbatches: int) -> list[str]:
    """The names to try: where tail or loss takes the whole batch, those that run every forward first."""
    names = [n for n in NAMES if n != "forward-only"] if asked == "auto" else [asked]
    tail = source.graph.tail
    if not (tail or source.settings.loss_on == "batch") or n_microbatches == 1:
        return names
    able = {*BREADTH_FIRST.values(), "forward-only"}
    fit = [name for name in dict.fromkeys(BREADTH_FIRST.get(n, n) for n in names) if name in able]
    if not fit:
        mixes = f"{source.graph.model} mixes the rows of a batch from {tail[0]} on" if tail else ""
        raise InputError(
            f"{mixes or 'loss_on is batch'}, which therefore waits for every microbatch, and schedule "
            f"{asked!r} goes backward before that; use "
            f"{' or '.join(map(repr, BREADTH_FIRST.values()))}, or n_microbatches=1"
        )
    return fit


def _rank_counts(most: int, least: int) -> list[int]:
    counts = range(least, most + 1)
    return [n for n in counts if most <= _FEW_RANKS or n in (least, most) or n.bit_count() == 1]


def _chosen(source: Source, n_ranks: int) -> list[tuple[int, ...]]:
    """The fastest so many ranks, and those with most room: where these have too little, any others have."""
    devices = source.cluster.devices
    asked = source.limits or (HUGE,) * len(devices)
    own = (HUGE if device.usable_bytes is None else device.usable_bytes for device in devices)
    room = [min(pair) for pair in zip(asked, own, strict=True)]
    fastest = sorted(range(len(devices)), key=lambda r: -devices[r].speed)
    roomiest = sorted(fastest, key=lambda r: -room[r])
    return [*dict.fromkeys(tuple(sorted(ranks[:n_ranks])) for ranks in (fastest, roomiest))]


def rank_orders(cluster: Cluster, limits: Sequence[int]) -> tuple[int, Iterator[tuple[int, ...]]]:
    """How many orders of the ranks differ, and those orders: ranks that are alike keep theirs.

    Two ranks are alike where swapping them changes neither speeds, memory nor any link.
    """
    classes: list[list[int]] = []
    for rank in range(cluster.n_ranks):
        home = next((c for c in classes if _alike(cluster, limits, c[0], rank)), None)
        if home is None:
            classes.append([rank])
        else:
            home.append(rank)
    count = math.factorial(cluster.n_ranks)
    for c in classes:
        count //= math.factorial(len(c))
    return count, _orders(classes, cluster.n_ranks)


def _orders(classes: Sequence[Sequence[int]], n_ranks: int) -> Iterator[tuple[int, ...]]:
    """Interleavings of the classes, the ranks' own order first where it is one."""
    if n_ranks == 0:
        yield ()
        return
    heads = sorted((c[0], x) for x, c in enumerate(classes) if c)
    for head, x in heads:
        rest = [c[1:] if y == x else c for y, c in enumerate(classes)]
        for order in _orders(rest, n_ranks - 1):
            yield (head, *order)


def _alike(cluster: Cluster, limits: Sequence[int], a: int, b: int) -> bool:
    one, other = cluster.devices[a], cluster.devices[b]
    if (one.speed, one.usable_bytes) != (other.speed, other.usable_bytes):
        return False
    if limits and limits[a] != limits[b]:
        return False
    if cluster.shared_nics.get(a, -1) != cluster.shared_nics.get(b, -1):
        return False
    if not cluster.links:
        sizes = [cluster.host_sizes[cluster.host(rank)] for rank in (a, b)]
        return cluster.host(a) == cluster.host(b) or sizes == [1, 1]
    others = [x for x in range(cluster.n_ranks) if x not in (a, b)]
    pairs = itertools.chain([((a, b), (b, a))], *([((a, x), (b, x)), ((x, a), (x, b))] for x in others))
    return all(cluster.link(*p).figures == cluster.link(*q).figures for p, q in pairs)
