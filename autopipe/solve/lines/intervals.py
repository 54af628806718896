"""The best chain whose stages are intervals of one topological order, exactly, with numpy.

An upper bound for the whole problem, usually equal to its optimum. Which orders to try is left to
``orders``; proofs are left to ``exact``.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
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

__all__ = ["Rows", "best_chain", "lightest_chain", "near_chain"]

_OVER = (1.1, 1.5, 3.0)
"""Over a bound by so much, chains are looked for before any are taken."""

_LOOKS = 256
"""So many starts between looks at the clock."""

_KINDS = 32
"""The most kinds of blocks that are looked at: those that most blocks are of."""

_HOST = "host_forward", "host_backward"


class Rows:
    """Loads of every interval that starts at ``i``, for ``i`` from the last item down to the first.

    Each quantity that depends on which nets and shares an interval touches is a difference array over the
    interval's end, changed at the touched positions as ``i`` moves: O(net sizes) in all, plus one cumulative
    sum per start.
    """

    def __init__(self, problem: Problem, order: Sequence[int]) -> None:
        self.problem, self.order, self.n = problem, order, len(order)
        self.kinds = list(dict.fromkeys(map(_kind, problem.stages)))
        self.kind_of = [self.kinds.index(_kind(s)) for s in problem.stages]
        self.speed, self.limit, self.alive = (
            np.array([getattr(kind, name) for kind in self.kinds])[:, None]
            for name in ("speed", "limit_bytes", "in_flight")
        )
        self.fastest, self.even = float(self.speed.max()), bool((self.speed == 1.0).all())
        self.links = list(dict.fromkeys(kind.links for kind in self.kinds))
        self.link_of = [self.links.index(kind.links) for kind in self.kinds]
        self.has_memory = problem.recompute != "never" or any(s.limit_bytes < HUGE for s in problem.stages)
        items = [problem.items[v] for v in order]
        self.forward = _prefix([i.forward_ns for i in items])
        self.backward = _prefix([i.backward_ns for i in items])
        self.host_forward, self.host_backward = (_prefix([i.host_ns[x] for i in items]) for x in (0, 1))
        self.real = _prefix([1 if i.ops else 0 for i in items])
        self.static = _prefix([i.static_bytes for i in items])
        self.saved = _prefix([i.saved_bytes for i in items])
        blocks = [(x, b) for x, i in enumerate(items) for b in i.blocks]
        self.has_blocks = problem.recompute == "auto" and bool(blocks)
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
        names = ("forward", "backward", "sync", "received", "sent", "static", "saved")
        self.d = {name: np.zeros(self.n + 1, dtype=np.int64) for name in (*names, *_HOST)}
        self.moving = np.zeros((len(self.links), self.n + 1), dtype=np.int64)
        self.share_work = any(s.forward_ns or s.backward_ns or any(s.host_ns) for s in problem.shares)
        self.plain = self.forward + self.backward
        most = 0 if self.has_blocks else HUGE if problem.recompute == "never" else 1
        kept = min(int(self.alive.min()), most)
        self.held = self.static + kept * self.saved

    def descend(self, limit: int) -> Iterator[tuple[int, int, Array]]:
        """(i, end, loads) for each start, last first; ``loads[s, j - i - 1]`` is stage s holding [i, j).

        Only ends are given whose work alone is at most ``limit`` and whose bytes some stage has room for;
        impossible stages cost :data:`HUGE`. Where blocks are computed again, a load is at least the true one.
        """
        for i in range(self.n - 1, -1, -1):
            for is_net, r, k in self.at[i]:
                (self._enter_net if is_net else self._enter_share)(r, k)
            reach = int(self.plain[i]) + most_work(limit, self.fastest)
            end = self.n
            if reach < self.plain[-1]:
                end = int(np.searchsorted(self.plain, reach, side="right")) - 1
            room = int(self.held[i]) + int(self.limit.max())
            if room < self.held[end]:
                end = int(np.searchsorted(self.held, room, side="right")) - 1
            yield i, max(end, i + 1), self._loads(i, max(end, i + 1))

    def _enter_net(self, r: int, k: int) -> None:
        """Intervals now start at a value's k-th place: its maker sends unless all are in, takers receive."""
        net = self.problem.nets[r]
        for moving, links in zip(self.moving, self.links, strict=True):
            self._enter(moving, r, k, *net.prices_ns(links))
        if self.has_memory:
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
        for name, ns in zip(_HOST, share.host_ns, strict=True):
            self.d[name][x] += sign * ns

    def _loads(self, i: int, end: int) -> Array:
        p = self.problem
        sync = np.cumsum(self.d["sync"][i:end])
        moving = np.cumsum(self.moving[:, i:end], axis=1)[self.link_of]
        forward, backward = self._work("forward", i, end), self._work("backward", i, end)
        if p.has_hosts:
            host = [self._work(name, i, end) for name in _HOST]
            again = p.recompute == "always"
            is_slower = (1 + again) * host[0] + host[1] > (1 + again) * forward + backward
            forward, backward = (
                np.where(is_slower, a, b) for a, b in zip(host, (forward, backward), strict=True)
            )
        work, fits = forward + backward, np.ones(1, dtype=bool)
        if self.has_memory:
            memory = self._memory(i, end)
            kept, again = memory_bytes(self.alive, *memory)
            fits, fits_again = kept <= self.limit, again <= self.limit
            if p.recompute == "always":
                work, fits = work + forward, fits_again
            elif self.has_blocks:
                redone, by_block = self._again(i, end, np.maximum(kept - self.limit, 0))
                work = work + np.where(by_block, self._scaled(redone), forward)
                fits = by_block | fits_again
            elif p.recompute == "auto":
                work, fits = np.where(fits, work, work + forward), fits | fits_again
        each = np.where(fits, stage_ns(work, moving, sync, p.overlap), HUGE)
        out = each[self.kind_of]
        if not p.allow_empty:
            out[:, self.real[i + 1 : end + 1] == self.real[i]] = HUGE
        if self.pinned:
            first = np.maximum.accumulate(self.first[i:end])
            last = np.minimum.accumulate(self.last[i:end])
            stages = np.arange(p.n_stages)[:, None]
            out[(stages < first) | (stages > last)] = HUGE
        return out

    def _scaled(self, ns: Array) -> Array:
        """Work on each kind of stage."""
        return np.atleast_2d(ns) if self.even else np.rint(ns / self.speed).astype(np.int64)

    def _again(self, i: int, end: int, over: Array) -> tuple[Array, Any]:
        """Blocks that bring stages down by what they are ``over``: their forward, and whether they do.

        Kinds of blocks by rising time per byte, as many as it takes: near the cheapest, and never less.
        """
        largest = np.maximum.accumulate(self.redone[i:end])
        need = np.where(over > 0, -(-(over + largest) // self.alive), 0)
        forward = np.zeros_like(need)
        for (ns, freed), count in zip(self.sorts, self.counts, strict=True):
            taken = np.minimum(count[i + 1 : end + 1] - count[i], np.maximum(0, -(-need // freed)))
            need, forward = need - taken * freed, forward + taken * ns
        return forward, need <= 0

    def _work(self, what: str, i: int, end: int) -> Array:
        prefix: Array = getattr(self, what)
        own: Array = prefix[i + 1 : end + 1] - prefix[i]
        return self._scaled(own + np.cumsum(self.d[what][i:end]) if self.share_work else own)

    def _memory(self, i: int, end: int) -> tuple[Array, Array, Array, Array, Array]:
        static = self.static[i + 1 : end + 1] - self.static[i] + np.cumsum(self.d["static"][i:end])
        saved = self.saved[i + 1 : end + 1] - self.saved[i] + np.cumsum(self.d["saved"][i:end])
        received = np.cumsum(self.d["received"][i:end])
        return (
            static,
            saved + received * self.problem.holds_received,
            np.maximum.accumulate(self.workspace[i:end]),
            received,
            np.cumsum(self.d["sent"][i:end]),
        )


def _kind(stage: Stage) -> Stage:
    """What stages of equal loads have in common."""
    return dataclasses.replace(stage, rank=0, host=0, nic=-1)


def best_chain(
    problem: Problem, order: Sequence[int], limit: int = HUGE, deadline: float = math.inf
) -> tuple[int, tuple[int, ...]] | None:
    """The least bottleneck over intervals of ``order``, and the stage of each item; None if over ``limit``.

    Where blocks are computed again, a bottleneck that is near the least.

    Only chains whose every load is at most ``limit`` are looked at. O(n · w · stages) for w the longest
    interval whose work is within the limit. Raises :class:`OutOfTime` past ``deadline``.
    """
    return _chain(problem, order, limit, deadline, additive=False)


def near_chain(
    problem: Problem, order: Sequence[int], lower_ns: int, deadline: float = math.inf
) -> tuple[int, tuple[int, ...]] | None:
    """The best chain of an order, near a bound first: the fewer items a stage may hold, the quicker.

    Raises :class:`OutOfTime` past ``deadline``.
    """
    for part in _OVER:
        found = best_chain(problem, order, round(lower_ns * part), deadline)
        if found is not None:
            return found
    return best_chain(problem, order, HUGE - 1, deadline)


def lightest_chain(
    problem: Problem, order: Sequence[int], limit: int, deadline: float = math.inf
) -> tuple[int, ...] | None:
    """Among chains with every load at most ``limit``, the one with the least sum of loads."""
    found = _chain(problem, order, limit, deadline, additive=True)
    return found[1] if found else None


def _chain(
    problem: Problem, order: Sequence[int], limit: int, deadline: float, *, additive: bool
) -> tuple[int, tuple[int, ...]] | None:
    n, k = len(order), problem.n_stages
    rest = np.full((k + 1, n + 1), HUGE, dtype=np.int64)
    rest[k, n] = 0
    if problem.allow_empty:
        rest[:, n] = 0
    choice = np.zeros((k, n + 1), dtype=np.int64)
    span = np.arange(k)
    for i, end, loads in Rows(problem, order).descend(limit):
        if i % _LOOKS == 0 and time.perf_counter() > deadline:
            raise OutOfTime
        after = rest[1:, i + 1 : end + 1]
        if additive:
            totals = np.where(loads <= limit, np.minimum(loads + after, HUGE), HUGE)
        else:
            totals = np.maximum(loads, after)
        best = np.argmin(totals, axis=1)
        rest[:k, i] = totals[span, best]
        choice[:, i] = i + 1 + best
        if problem.allow_empty:
            _skip(rest, choice, i)
    if rest[0, 0] >= HUGE or (not additive and rest[0, 0] > limit):
        return None
    stage_of = [0] * n
    at = 0
    for s in range(k):
        stop = int(choice[s, at]) if at < n else n
        for x in range(at, stop):
            stage_of[order[x]] = s
        at = stop
    return int(rest[0, 0]), tuple(stage_of)


def _skip(rest: Array, choice: Array, i: int) -> None:
    """A stage may stay empty."""
    for s in range(choice.shape[0] - 1, -1, -1):
        if rest[s + 1, i] < rest[s, i]:
            rest[s, i], choice[s, i] = rest[s + 1, i], i


def _prefix(values: Sequence[int]) -> Array:
    return np.concatenate([[0], np.cumsum(np.array(values, dtype=np.int64))])
