"""Every downset whose work lies in a window: the places where a chain whose loads are bounded may be cut.

Which windows and stages a bound leaves is said by ``exact`` and ``reach``; what a stage between two downsets
costs, by ``pairs``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ..definition.problem import Array, Net, Problem
from ..proof.bounds import Room
from .reach import Bits

__all__ = ["Downsets", "TooMany", "Window"]


_DENSE = 0.75
"""Downsets are copied without those that are dropped once they are fewer than this part."""


class TooMany(Exception):
    """More downsets than may be looked through."""


@dataclasses.dataclass(frozen=True, slots=True)
class Downsets:
    """Sets of items closed under what must come earlier, one a row.

    Every row holds the items of ``base``, and those of ``free`` that ``rows`` (downsets × free items) marks.
    """

    base: Bits
    free: Array
    rows: Bits

    def __len__(self) -> int:
        return len(self.rows)

    def holds(self, x: int) -> Bits:
        """Which items row ``x`` holds."""
        out = self.base.copy()
        out[self.free] = self.rows[x]
        return out

    def picked(self, rows: Array) -> Downsets:
        """Some of the rows."""
        return dataclasses.replace(self, rows=self.rows[rows])

    def sums(self, each: Array) -> Array:
        """The sum over each row of what each item has: an integer, or a row of them."""
        out: Array = self.rows @ each[self.free] + each[self.base].sum(axis=0)
        return out


@dataclasses.dataclass(frozen=True)
class Window:
    """The downsets that hold ``base`` and nothing of ``out``, with work within ``limits`` (least, most; ns).

    ``room`` is the same, but what the open values cost to send counts as work beyond its most, and what they
    cost to receive as work short of its least, except for what is ``spare`` of both.
    """

    problem: Problem
    base: Bits
    out: Bits
    limits: tuple[int, int]
    room: tuple[int, int]
    spare: tuple[int, int]

    def downsets(self, tick: Callable[[], None], most: int, some: bool = False) -> Downsets:
        """All of them. Past ``most``, raises :class:`TooMany`, or goes on with ``some``: always the same."""
        free = np.flatnonzero(~self.base & ~self.out)
        return Downsets(self.base, free, _Branching(self, free).rows(tick, most, some))


class _Branching:
    """Takes or leaves the free items in turn; drops what can no longer come into the window."""

    def __init__(self, window: Window, free: Array) -> None:
        self.window, self.problem, self.room = window, window.problem, Room.of(window.problem)
        self.works = np.array([i.work_ns for i in self.problem.items], dtype=np.int64)
        self.place = {v: x for x, v in enumerate(free.tolist())}
        self.held = np.zeros((1, len(free) // 64 + 1), dtype=np.uint64)
        self.work = np.full(1, self.works[window.base].sum(), dtype=np.int64)
        self.sent = np.zeros(1, dtype=np.int64)
        self.received = np.zeros(1, dtype=np.int64)
        self.rest = int(self.works[free].sum())
        self.closes: dict[int, list[int]] = {v: [] for v in self.place}
        self.opens: dict[int, list[int]] = {v: [] for v in self.place}
        self.backs: dict[int, list[int]] = {v: [] for v in self.place}
        for n, net in enumerate(self.problem.nets):
            if self.problem.directions[n] < 0:
                self._back(n, net)
            elif any(window.out[v] for v in net.consumers):
                if window.base[net.producer]:
                    self.sent += net.send_ns
                    self.received += net.receive_ns
                elif net.producer in self.place:
                    self.opens[net.producer].append(n)
            elif not window.out[net.producer]:
                for v in net.consumers:
                    if v in self.place:
                        self.closes[v].append(n)

    def _back(self, n: int, net: Net) -> None:
        """A value that is taken before it is made: open while a taker is held and its maker is not."""
        if self.window.out[net.producer]:
            if any(self.window.base[v] for v in net.consumers):
                self.sent += net.receive_ns
                self.received += net.send_ns
                return
            for v in net.consumers:
                if v in self.place:
                    self.backs[v].append(n)
        elif net.producer in self.place:
            self.backs[net.producer].append(n)

    def rows(self, tick: Callable[[], None], most: int, some: bool) -> Bits:
        """Downsets × free items."""
        draw = np.random.default_rng(0)
        self._keep(self._fits())
        for v, x in self.place.items():
            tick()
            can = self._holds(self.problem.before[v])
            left, taken = self._left(v), np.flatnonzero(can)
            held = self.held[taken]
            held[:, x // 64] |= np.uint64(1 << x % 64)
            prices = [self.problem.nets[n] for n in self.opens[v]]
            sent = self.sent[taken] + sum(net.send_ns for net in prices)
            received = self.received[taken] + sum(net.receive_ns for net in prices)
            for net in (self.problem.nets[n] for n in self.backs[v]):
                if net.producer != v:
                    first = ~self._any([u for u in net.consumers if u < v])[taken]
                    sent, received = sent + first * net.receive_ns, received + first * net.send_ns
            self.held = np.concatenate([self.held, held])
            self.work = np.concatenate([self.work, self.work[taken] + self.works[v]])
            self.sent = np.concatenate([left[0], sent])
            self.received = np.concatenate([left[1], received])
            self.rest -= int(self.works[v])
            fits = self._fits()
            if fits.sum() < _DENSE * len(fits) or len(fits) > most:
                self._keep(fits)
            if len(self.work) > most:
                if not some:
                    raise TooMany
                cheap = np.argsort(self.sent + self.received + draw.random(len(self.work)), kind="stable")
                rest = draw.permutation(cheap[most // 2 :])[: most - most // 2]
                self._keep(np.sort(np.concatenate([cheap[: most // 2], rest])))
        self._keep(self._fits())
        bits = np.unpackbits(self.held.view(np.uint8), axis=1, bitorder="little")
        return bits[:, : len(self.place)].astype(bool)

    def _left(self, v: int) -> tuple[Array, Array]:
        """The prices of open values once an item is left: the first taker left, or the maker of one held."""
        sent, received = self.sent, self.received
        for n in self.closes[v]:
            net = self.problem.nets[n]
            opened = self._holds([net.producer, *(u for u in net.consumers if u < v)])
            sent = sent + opened * net.send_ns
            received = received + opened * net.receive_ns
        for net in (self.problem.nets[n] for n in self.backs[v]):
            if net.producer == v:
                held = self._any(net.consumers)
                sent, received = sent + held * net.receive_ns, received + held * net.send_ns
        return sent, received

    def _any(self, items: Sequence[int]) -> Bits:
        """Which rows hold one of the given items."""
        out = np.full(len(self.work), any(self.window.base[u] for u in items))
        for u in items:
            if u in self.place:
                out |= self._holds([u])
        return out

    def _holds(self, items: Sequence[int]) -> Bits:
        """Which rows hold all the given items."""
        out = np.ones(len(self.work), dtype=bool)
        for u in items:
            if u in self.place:
                word, bit = divmod(self.place[u], 64)
                out &= (self.held[:, word] >> np.uint64(bit)) & np.uint64(1) == 1
        return out

    def _fits(self) -> Bits:
        w = self.window
        sent, received = (
            self.room.as_work(np.maximum(0, prices - spare))
            for prices, spare in zip((self.sent, self.received), w.spare, strict=True)
        )
        ever = self.work + self.rest
        fits: Bits = (self.work <= w.limits[1]) & (ever >= w.limits[0])
        fits &= (self.work + sent <= w.room[1]) & (ever - received >= w.room[0])
        return fits

    def _keep(self, rows: Bits | Array) -> None:
        self.held, self.work = self.held[rows], self.work[rows]
        self.sent, self.received = self.sent[rows], self.received[rows]
