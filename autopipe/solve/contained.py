"""Stages between downsets where loads are plain sums: only pairs of which one holds the other are priced.

In wide windows one pair in hundreds is a stage at all. Loads with memory, speeds or shares are left to
``pairs``, which downsets to pair to ``exact``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .alike import Alike
from .pairs import Floats, Layer
from .problem import Array, Problem
from .windows import Downsets

__all__ = ["Contained"]

_CELLS = 1 << 16
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
        here, there = self._common(a, b)
        held, lacked = _packed(a.downsets, b.downsets)
        early = [(x, a.downsets.sums(e), b.downsets.sums(e)) for x, e in self.alike]
        n_pairs = 0
        for rows, columns in _blocks(a.work, b.work, bound):
            tick()
            n_pairs += (rows.stop - rows.start) * (columns.stop - columns.start)
            x, y = _holds(held, lacked, rows, columns)
            loads = b.work[y] - a.work[x] + a.sums["receive_ns"][x] + b.sums["send_ns"][y]
            for each, before, after in early:
                more = after[y] - before[x]
                loads += np.where(more > 0, more * each.send_ns, -more * each.receive_ns)
            loads = loads - np.einsum("ij,ij->i", here[x], there[y])
            if not self.problem.allow_empty:
                loads[b.sums["real"][y] == a.sums["real"][x]] = np.inf
            totals = np.maximum(loads, value[x])
            fits = np.flatnonzero(totals <= bound)
            fits = fits[np.lexsort((x[fits], totals[fits], y[fits]))]
            columns_hit, first = np.unique(y[fits], return_index=True)
            fits = fits[first]
            better = totals[fits] < best[columns_hit]
            best[columns_hit[better]], parent[columns_hit[better]] = totals[fits[better]], x[fits[better]]
        return best, parent, n_pairs

    def _common(self, a: Layer, b: Layer) -> tuple[Floats, Floats]:
        """Columns whose products are the prices that a pair of rows does not pay after all."""
        here, there = [], []
        for n in sorted(a.taken.keys() & b.taken.keys()):
            net, x, y = self.problem.nets[n], a.taken[n], b.taken[n]
            if len(net.consumers) == 1:
                here.append((x >= 0) * (net.send_ns + net.receive_ns))
                there.append(y >= 0)
                continue
            here.append((x >= 0) * net.send_ns)
            there.append(y >= 0)
            for j in np.intersect1d(x[x >= 0], y):
                here.append((x == j) * net.receive_ns)
                there.append(y == j)
        used = [c for c, (x, y) in enumerate(zip(here, there, strict=True)) if x.any() and y.any()]
        left, right = (
            np.array([side[c] for c in used], dtype=np.float64).reshape(len(used), n).T.copy()
            for side, n in ((here, len(a.work)), (there, len(b.work)))
        )
        return left, right


def _blocks(a: Array, b: Array, most: int) -> Iterator[tuple[slice, slice]]:
    """Rows of two layers by rising work whose difference may be at most so much, some at a time."""
    width = max(1, min(len(b), _CELLS))
    height = max(1, _CELLS // width)
    for at in range(0, len(a), height):
        rows = slice(at, min(at + height, len(a)))
        first = int(np.searchsorted(b, a[at]))
        last = int(np.searchsorted(b, a[rows.stop - 1] + most, side="right"))
        for start in range(first, last, width):
            yield rows, slice(start, min(start + width, last))


def _packed(a: Downsets, b: Downsets) -> tuple[Array, Array]:
    """Of items that both leave open: which each row of ``a`` holds, and each of ``b`` lacks, in words."""
    _, here, there = np.intersect1d(a.free, b.free, assume_unique=True, return_indices=True)
    out = []
    for bits in (a.rows[:, here], ~b.rows[:, there]):
        words = np.zeros((bits.shape[1] // 64 + 1, len(bits)), dtype=np.uint64)
        packed = np.packbits(bits, axis=1, bitorder="little")
        padded = np.zeros((len(bits), 8 * len(words)), dtype=np.uint8)
        padded[:, : packed.shape[1]] = packed
        words[:] = padded.view(np.uint64).T
        out.append(words)
    return out[0], out[1]


def _holds(held: Array, lacked: Array, rows: slice, columns: slice) -> tuple[Array, Array]:
    """The pairs of rows of which the second holds all that the first does."""
    x, y = np.nonzero((held[0, rows, None] & lacked[0, None, columns]) == 0)
    x, y = x + rows.start, y + columns.start
    for w in range(1, len(held)):
        good = held[w, x] & lacked[w, y] == 0
        x, y = x[good], y[good]
    return x, y
