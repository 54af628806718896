"""Stages between downsets where loads are plain sums: only pairs of which one holds the other are priced.

In wide windows one pair in hundreds is a stage at all. Loads with memory, speeds or shares are left to
``pairs``, which downsets to pair to ``exact``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..definition.problem import Array, Problem, stage_ns
from .alike import Alike
from .pairs import Floats, Layer
from .reach import Bits
from .windows import Downsets

__all__ = ["Contained"]

_ROWS, _COLUMNS = 32, 1 << 14
"""Pairs looked at in one go: what stays in a core's cache."""


class Contained:
    """The stages from one layer of downsets to the next, for one problem and its likes."""

    def __init__(self, problem: Problem, alike: Sequence[Alike]) -> None:
        self.problem = problem
        self.alike = [(each, each.early(len(problem.items))) for each in alike]

    def step(
        self, a: Layer, b: Layer, value: Floats, bound: int, tick: Callable[[], None]
    ) -> tuple[Floats, Array, int]:
        """Per row of ``b`` the least bottleneck within the bound and the row before it; pairs looked at."""
        best, parent = np.full(len(b.work), np.inf), np.zeros(len(b.work), dtype=np.int64)
        common = _Common(self.problem, a, b)
        held, lacked = _packed(a.downsets, b.downsets)
        early = [(x, a.downsets.sums(e), b.downsets.sums(e)) for x, e in self.alike]
        n_pairs = 0
        for rows, columns in _blocks(a.work, b.work, held, lacked, bound):
            tick()
            n_pairs += len(rows) * len(columns)
            x, y = _holds(held[:, rows], lacked[:, columns])
            x, y = rows[x], columns[y]
            loads = b.work[y] - a.work[x]
            near = np.flatnonzero(loads <= bound)
            x, y = x[near], y[near]
            moving = a.sums["1 0"][x] + b.sums["0 0"][y] - common.prices(x, y)
            for each, before, after in early:
                more = after[y] - before[x]
                moving += np.where(more > 0, more * each.send_ns, -more * each.receive_ns)
            totals = np.maximum(stage_ns(loads[near], moving, 0, self.problem.overlap), value[x])
            if not self.problem.allow_empty:
                totals[b.sums["real"][y] == a.sums["real"][x]] = np.inf
            better = np.flatnonzero((totals <= bound) & (totals < best[y]))
            x, y, totals = x[better], y[better], totals[better]
            np.minimum.at(best, y, totals)
            least = totals == best[y]
            parent[y[least]] = x[least]
        return best, parent, n_pairs


class _Common:
    """The prices that a pair of rows does not pay after all, for what is open at both."""

    def __init__(self, problem: Problem, a: Layer, b: Layer) -> None:
        """Sparse rows of columns and prices on one side, whether a column is met on the other."""
        columns = [(x, price, y) for x, price, y in _columns(problem, a, b) if x.any() and y.any()]
        count = np.zeros(len(a.work), dtype=np.int64)
        for x, _, _ in columns:
            count += x
        self.column = np.full((count.max(initial=0), len(count)), len(columns))
        self.price = np.zeros_like(self.column)
        self.met = np.zeros((len(columns) + 1, len(b.work)), dtype=bool)
        count[:] = 0
        for c, (x, price, y) in enumerate(columns):
            rows = np.flatnonzero(x)
            self.column[count[rows], rows] = c
            self.price[count[rows], rows] = price
            count[rows] += 1
            self.met[c] = y

    def prices(self, x: Array, y: Array) -> Array:
        """The sum for each pair of rows."""
        out = np.zeros(len(x), dtype=np.int64)
        for column, price in zip(self.column, self.price, strict=True):
            out += self.met[column[x], y] * price[x]
        return out


def _columns(problem: Problem, a: Layer, b: Layer) -> Iterator[tuple[Bits, int, Bits]]:
    """Where a value is open, or so many of its takers held, in rows of both layers, and what that saves."""
    for n in sorted(a.taken.keys() & b.taken.keys()):
        net, here, there = problem.nets[n], a.taken[n], b.taken[n]
        alone = len(net.consumers) == 1
        yield here >= 0, net.send_ns + net.receive_ns * alone, there >= 0
        for j in () if alone else np.intersect1d(here[here >= 0], there):
            yield here == j, net.receive_ns, there == j


def _blocks(a: Array, b: Array, held: Array, lacked: Array, most: int) -> Iterator[tuple[Array, Array]]:
    """Rows of the first layer with much in common, and those of the second that may be paired with them.

    A pair's work may differ by so much at most.
    """
    order = np.lexsort(held[::-1])
    for at in range(0, len(a), _ROWS):
        rows = order[at : at + _ROWS]
        common = np.bitwise_and.reduce(held[:, rows], axis=1)
        columns = np.flatnonzero(b <= a[rows].max() + most)
        for word, there in zip(common, lacked, strict=True):
            columns = columns[there[columns] & word == 0]
        for start in range(0, len(columns), _COLUMNS):
            yield rows, columns[start : start + _COLUMNS]


def _packed(a: Downsets, b: Downsets) -> tuple[Array, Array]:
    """Of items that both leave open: which each row of ``a`` holds, and each of ``b`` lacks, in words.

    Items that tell most pairs apart come first.
    """
    _, here, there = np.intersect1d(a.free, b.free, assume_unique=True, return_indices=True)
    held, lacked = a.rows[:, here], ~b.rows[:, there]
    order = np.argsort(-held.mean(axis=0) * lacked.mean(axis=0), kind="stable")
    return _words(held[:, order]), _words(lacked[:, order])


def _words(bits: Bits) -> Array:
    """Words of 64 bits × rows."""
    out = np.zeros((len(bits), 8 * (bits.shape[1] // 64 + 1)), dtype=np.uint8)
    packed = np.packbits(bits, axis=1, bitorder="little")
    out[:, : packed.shape[1]] = packed
    words: Array = np.ascontiguousarray(out.view(np.uint64).T)
    return words


def _holds(held: Array, lacked: Array) -> tuple[Array, Array]:
    """The pairs of rows of which the second holds all that the first does."""
    may = (held[0, :, None] & lacked[0]) == 0
    x, y = np.divmod(np.flatnonzero(may), may.shape[1])
    for here, there in zip(held[1:], lacked[1:], strict=True):
        good = here[x] & there[y] == 0
        x, y = x[good], y[good]
    return x, y
