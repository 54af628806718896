"""The best chain whose stages are intervals of one topological order, exactly, with numpy.

An upper bound for the whole problem, usually equal to its optimum. Which orders to try is left to
``orders``; proofs are left to ``exact``.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..definition.answer import OutOfTime
from ..definition.blocks import redone_bytes
from ..definition.problem import (
    HUGE,
    Array,
    Problem,
    Stage,
    memory_bytes,
    most_work,
    peak_bytes,
    stage_ns,
)
from ..stopping import clock_s

__all__ = ["Rows", "best_chain", "lightest_chains", "near_chain"]

_OVER = (1.01, 1.1, 1.5, 3.0)
"""Over a bound by so much, chains are looked for before any are taken."""

_LOOKS = 256
"""So many starts between looks at the clock."""

_KINDS = 32
"""The most kinds of blocks that are looked at: those that most blocks are of."""

_PACES = ("forward", "backward"), ("host_forward", "host_backward")
"""What devices take, and their hosts."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """Stages that follow one another, by kind: a row for each kind, and the row that each stage has."""

    kind_of: list[int]
    link_of: list[int]
    speed: Array
    limit: Array
    alive: Array
    is_even: bool

    @classmethod
    def of(cls, stages: Sequence[Stage], links: Sequence[tuple[int, int]]) -> _Run:
        kinds = list(dict.fromkeys(stages))
        speed, limit, alive = (
            np.array([getattr(kind, name) for kind in kinds])[:, None]
            for name in ("speed", "limit_bytes", "in_flight")
        )
        row = {kind: x for x, kind in enumerate(kinds)}
        link_of = [links.index(kind.links) for kind in kinds]
        return cls([row[s] for s in stages], link_of, speed, limit, alive, bool((speed == 1.0).all()))


class Rows:
    """Loads of the intervals that start at ``i``, for ``i`` from the last item down to the first.

    Each quantity that depends on which nets and shares an interval touches is a difference array over the
    interval's end, changed at the touched positions as ``i`` moves: O(net sizes) in all, plus one cumulative
    sum per start.
    """

    def __init__(self, problem: Problem, order: Sequence[int]) -> None:
        self.problem, self.order, self.n = problem, order, len(order)
        self.kinds = [dataclasses.replace(s, rank=0, host=0, nic=-1) for s in problem.stages]
        self.runs: dict[tuple[int, int], _Run] = {}
        self.links = list(dict.fromkeys(kind.links for kind in self.kinds))
        self.fastest = max(s.speed for s in problem.stages)
        self.roomiest = max(s.limit_bytes for s in problem.stages)
        items = [problem.items[v] for v in order]
        self.forward = _prefix([i.forward_ns for i in items])
        self.backward = _prefix([i.backward_ns for i in items])
        self.host_forward, self.host_backward = (_prefix([i.host_ns[x] for i in items]) for x in (0, 1))
        self.real = _prefix([1 if i.ops else 0 for i in items])
        self.static = _prefix([i.static_bytes for i in items])
        self.saved = _prefix([i.saved_bytes for i in items])
        blocks = [(x, b) for x, i in enumerate(items) for b in i.blocks]
        self.redone = np.array([redone_bytes(i.blocks) for i in items], dtype=np.int64)
        kinds = collections.Counter((b.forward_ns, b.freed_bytes) for _, b in blocks)
        self.sorts = sorted((k for k, _ in kinds.most_common(_KINDS)), key=lambda kind: kind[0] / kind[1])
        where = [[x for x, b in blocks if (b.forward_ns, b.freed_bytes) == kind] for kind in self.sorts]
        self.counts = [_prefix(np.bincount(places, minlength=self.n).tolist()) for places in where]
        self.workspace = np.array([peak_bytes(problem, v) for v in order], dtype=np.int64)
        self.first = np.array([i.first for i in items], dtype=np.int64)
        self.last = np.array([problem.last_of(v) for v in order], dtype=np.int64)
        self.pinned = bool(self.first.any() or (self.last < problem.n_stages - 1).any())
        position = {v: x for x, v in enumerate(order)}
        self.nets = [sorted({position[v] for v in (n.producer, *n.consumers)}) for n in problem.nets]
        self.makers = [position[n.producer] for n in problem.nets]
        self.shares = [sorted({position[v] for v in s.items}) for s in problem.shares]
        self.at: list[list[tuple[bool, int, int]]] = [[] for _ in order]
        for is_net, rows in ((True, self.nets), (False, self.shares)):
            for r, places in enumerate(rows):
                for k, x in enumerate(places):
                    self.at[x].append((is_net, r, k))
        self.share_work = any(s.forward_ns or s.backward_ns or any(s.host_ns) for s in problem.shares)
        self.plain = self.forward + self.backward
        most = 0 if problem.has_blocks else HUGE if problem.recompute == "never" else 1
        kept = min(*(s.in_flight for s in problem.stages), most)
        self.held = self.static + kept * self.saved

    def descend(self, limit: int) -> Iterator[tuple[int, slice, slice, Array]]:
        """(i, stages, ends, loads) for each start, last first: a row for each stage that may start there.

        Only those stages and ends are given whose own work is at most ``limit`` and whose bytes some stage
        has room for, and that leave as much room for all that comes before and after; what is impossible
        costs :data:`HUGE`. Where blocks are computed again, a load is at least the true one.
        """
        names = (*itertools.chain(*_PACES), "sync", "received", "sent", "static", "saved")
        self.d = {name: np.zeros(self.n + 1, dtype=np.int64) for name in names}
        self.moving = np.zeros((len(self.links), self.n + 1), dtype=np.int64)
        first, last, least = (row.tolist() for row in self._bands(limit))
        for i in range(self.n - 1, -1, -1):
            for is_net, r, k in self.at[i]:
                (self._enter_net if is_net else self._enter_share)(r, k)
            if first[i] > last[i]:
                continue
            reach = int(self.plain[i]) + most_work(limit, self.fastest)
            end = self.n
            if reach < self.plain[-1]:
                end = int(np.searchsorted(self.plain, reach, side="right")) - 1
            room = int(self.held[i]) + self.roomiest
            if room < self.held[end]:
                end = int(np.searchsorted(self.held, room, side="right")) - 1
            stages = slice(first[i], last[i] + 1)
            ends = slice(max(i + 1, least[first[i]]), max(end, i + 1) + 1)
            if ends.start < ends.stop:
                yield i, stages, ends, self._loads(i, stages, ends)

    def _bands(self, limit: int) -> tuple[Array, Array, Array]:
        """The first and the last stage that may start at each item, and the least end of each stage."""
        k = self.problem.n_stages
        first, last, least = (np.zeros(n, dtype=np.int64) for n in (self.n, self.n, k))
        last += k - 1
        works = [most_work(limit, kind.speed) for kind in self.kinds]
        for held, rooms in ((self.plain, works), (self.held, [kind.limit_bytes for kind in self.kinds])):
            before, after = (
                np.array([min(room, HUGE) for room in itertools.accumulate(row, initial=0)])
                for row in (rooms, rooms[::-1])
            )
            rest = held[-1] - held
            first = np.maximum(first, np.searchsorted(before, held[:-1]))
            last = np.minimum(last, k - np.searchsorted(after, rest[:-1]))
            least = np.maximum(least, np.searchsorted(held, held[-1] - after[:k][::-1]))
        return first, last, least

    def _enter_net(self, r: int, k: int) -> None:
        """Intervals now start at a value's k-th place: its maker sends unless all are in, takers receive."""
        net = self.problem.nets[r]
        for moving, links in zip(self.moving, self.links, strict=True):
            self._enter(moving, r, k, *net.prices_ns(links))
        if self.problem.has_memory:
            self._enter(self.d["received"], r, k, 0, net.n_bytes)
            self._enter(self.d["sent"], r, k, net.sent_bytes, 0)

    def _enter(self, d: Array, r: int, k: int, send: int, receive: int) -> None:
        places = self.nets[r]
        d[places[k]] += send if self.makers[r] == places[k] else receive
        if k + 1 < len(places):
            d[places[k + 1]] -= receive
        if k == 0:
            d[places[-1]] -= send

    def _enter_share(self, r: int, k: int) -> None:
        share, places = self.problem.shares[r], self.shares[r]
        x = places[k]
        self._touch(share, x, 1)
        if k + 1 < len(places):
            self._touch(share, places[k + 1], -1)
        if k == 0:
            self.d["sync"][places[-1]] -= share.sync_ns

    def _touch(self, share, x: int, sign: int) -> None:  # type: ignore[no-untyped-def]
        self.d["sync"][x] += sign * share.sync_ns
        self.d["static"][x] += sign * share.static_bytes
        self.d["saved"][x] += sign * share.saved_bytes
        self.d["forward"][x] += sign * share.forward_ns
        self.d["backward"][x] += sign * share.backward_ns
        for name, ns in zip(_PACES[1], share.host_ns, strict=True):
            self.d[name][x] += sign * ns

    def _run(self, stages: slice) -> _Run:
        key = stages.start, stages.stop
        if key not in self.runs:
            self.runs[key] = _Run.of(self.kinds[stages], self.links)
        return self.runs[key]

    def _loads(self, i: int, stages: slice, ends: slice) -> Array:
        p, run = self.problem, self._run(stages)
        sync = _along(np.add, self.d["sync"], i, ends)
        moving = _along(np.add, self.moving, i, ends)[run.link_of]
        times = [[self._time(name, i, ends, run) for name in pace] for pace in _PACES[: 1 + p.has_hosts]]
        work, twice = (functools.reduce(np.maximum, (n * f + b for f, b in times)) for n in (1, 2))
        fits = np.ones(1, dtype=bool)
        if self.problem.has_memory:
            kept, again = memory_bytes(run.alive, *self._memory(i, ends))
            fits, fits_again = kept <= run.limit, again <= run.limit
            if p.recompute == "always":
                work, fits = twice, fits_again
            elif p.has_blocks:
                redone, by_block = self._again(i, ends, np.maximum(kept - run.limit, 0), run)
                work, fits = np.where(by_block, work + _scaled(redone, run), twice), by_block | fits_again
            elif p.recompute == "auto":
                work, fits = np.where(fits, work, twice), fits | fits_again
        each = np.where(fits, stage_ns(work, moving, sync, p.overlap), HUGE)
        out = each[run.kind_of]
        if not p.allow_empty:
            out[:, self.real[ends] == self.real[i]] = HUGE
        if self.pinned:
            first, last = (
                _along(bound, row, i, ends)
                for bound, row in ((np.maximum, self.first), (np.minimum, self.last))
            )
            among = np.arange(stages.start, stages.stop)[:, None]
            out[(among < first) | (among > last)] = HUGE
        return out

    def _again(self, i: int, ends: slice, over: Array, run: _Run) -> tuple[Array, Any]:
        """Blocks that bring stages down by what they are ``over``: their forward, and whether they do.

        Kinds of blocks by rising time per byte, as many as it takes: near the cheapest, and never less.
        """
        largest = _along(np.maximum, self.redone, i, ends)
        need = np.where(over > 0, -(-(over + largest) // run.alive), 0)
        forward = np.zeros_like(need)
        for (ns, freed), count in zip(self.sorts, self.counts, strict=True):
            taken = np.minimum(count[ends] - count[i], np.maximum(0, -(-need // freed)))
            need, forward = need - taken * freed, forward + taken * ns
        return forward, need <= 0

    def _time(self, what: str, i: int, ends: slice, run: _Run) -> Array:
        prefix: Array = getattr(self, what)
        own: Array = prefix[ends] - prefix[i]
        return _scaled(own + _along(np.add, self.d[what], i, ends) if self.share_work else own, run)

    def _memory(self, i: int, ends: slice) -> tuple[Array, Array, Array, Array, Array]:
        received = _along(np.add, self.d["received"], i, ends)
        static, saved = (
            prefix[ends] - prefix[i] + _along(np.add, self.d[name], i, ends)
            for name, prefix in (("static", self.static), ("saved", self.saved))
        )
        return (
            static,
            saved + received * self.problem.holds_received,
            _along(np.maximum, self.workspace, i, ends),
            received,
            _along(np.add, self.d["sent"], i, ends),
        )


def _along(ufunc: np.ufunc, row: Array, i: int, ends: slice) -> Array:
    """What intervals from ``i`` to the ends come to, of one row or several."""
    out: Array = ufunc.accumulate(row[..., i : ends.stop - 1], axis=-1)[..., ends.start - i - 1 :]
    return out


def _scaled(ns: Array, run: _Run) -> Array:
    """Work on each kind of stage."""
    return np.atleast_2d(ns) if run.is_even else np.rint(ns / run.speed).astype(np.int64)


def best_chain(
    problem: Problem, order: Sequence[int], limit: int = HUGE, deadline: float = math.inf
) -> tuple[int, tuple[int, ...]] | None:
    """The least bottleneck over intervals of ``order``, and the stage of each item; None if over ``limit``.

    Where blocks are computed again, a bottleneck that is near the least.

    Only chains whose every load is at most ``limit`` are looked at. O(n · w · stages) for w the longest
    interval whose work is within the limit. Raises :class:`OutOfTime` past ``deadline``.
    """
    return _chain(Rows(problem, order), limit, deadline)


def near_chain(
    problem: Problem, order: Sequence[int], lower_ns: int, deadline: float = math.inf
) -> tuple[int, tuple[int, ...]] | None:
    """The best chain of an order, near a bound first: the fewer items a stage may hold, the quicker.

    Raises :class:`OutOfTime` past ``deadline``.
    """
    rows = Rows(problem, order)
    for part in _OVER:
        found = _chain(rows, round(lower_ns * part), deadline)
        if found is not None:
            return found
    return _chain(rows, HUGE - 1, deadline)


def lightest_chains(
    problem: Problem, order: Sequence[int], limits: Sequence[int], deadline: float = math.inf
) -> list[tuple[int, ...] | None]:
    """For each limit, among chains with every load at most that, the one with the least sum of loads.

    Loads are priced once for all limits. Raises :class:`OutOfTime` past ``deadline``.
    """
    rows = Rows(problem, order)
    ways = [_Ways(rows, limit, additive=True) for limit in limits]
    _scan(rows, ways, max(limits), deadline)
    return [found[1] if (found := way.found()) else None for way in ways]


def _chain(rows: Rows, limit: int, deadline: float) -> tuple[int, tuple[int, ...]] | None:
    """The least bottleneck of the intervals of an order, where it is within the limit."""
    way = _Ways(rows, limit, additive=False)
    _scan(rows, [way], limit, deadline)
    return way.found()


def _scan(rows: Rows, ways: Sequence[_Ways], limit: int, deadline: float) -> None:
    """Price every interval whose work is within the limit, those that start last first."""
    for x, (i, stages, ends, loads) in enumerate(rows.descend(limit)):
        if x % _LOOKS == 0 and clock_s() > deadline:
            raise OutOfTime
        for way in ways:
            way.enter(i, stages, ends, loads)


class _Ways:
    """Per stage and item, the best way from there to the end: the least bottleneck, or sum of loads."""

    def __init__(self, rows: Rows, limit: int, *, additive: bool) -> None:
        problem, n, k = rows.problem, rows.n, rows.problem.n_stages
        self.order, self.limit, self.additive = rows.order, limit, additive
        self.rest = np.full((k + 1, n + 1), HUGE, dtype=np.int64)
        self.rest[k, n] = 0
        self.may_skip = problem.allow_empty
        if self.may_skip:
            self.rest[:, n] = 0
        self.choice = np.zeros((k, n + 1), dtype=np.int64)

    def enter(self, i: int, stages: slice, ends: slice, loads: Array) -> None:
        """Enter the intervals that start at an item, once those that start later are."""
        after = self.rest[stages.start + 1 : stages.stop + 1, ends]
        if self.additive:
            totals = np.where(loads <= self.limit, np.minimum(loads + after, HUGE), HUGE)
        else:
            totals = np.maximum(loads, after)
        best = np.argmin(totals, axis=1)
        self.rest[stages, i] = totals[np.arange(len(best)), best]
        self.choice[stages, i] = ends.start + best
        if self.may_skip:
            _skip(self.rest, self.choice, i)

    def found(self) -> tuple[int, tuple[int, ...]] | None:
        """The best way from the first item on, and the stage of each item; None where there is none."""
        value, n = int(self.rest[0, 0]), len(self.order)
        if value >= HUGE or (not self.additive and value > self.limit):
            return None
        stage_of = [0] * n
        at = 0
        for s, choice in enumerate(self.choice):
            stop = int(choice[at]) if at < n else n
            for x in range(at, stop):
                stage_of[self.order[x]] = s
            at = stop
        return value, tuple(stage_of)


def _skip(rest: Array, choice: Array, i: int) -> None:
    """A stage may stay empty."""
    for s in range(choice.shape[0] - 1, -1, -1):
        if rest[s + 1, i] < rest[s, i]:
            rest[s, i], choice[s, i] = rest[s + 1, i], i


def _prefix(values: Sequence[int]) -> Array:
    return np.concatenate([[0], np.cumsum(np.array(values, dtype=np.int64))])
