"""Every downset whose work lies in a window: the places where a chain whose loads are bounded may be cut.

Which windows a bound leaves is said by ``exact``; what a stage between two downsets costs, by ``pairs``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from .problem import Array, Problem

__all__ = ["Bits", "Downsets", "TooMany", "Windows"]

Bits = npt.NDArray[np.bool_]


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
        """The sum over each row of one integer per item."""
        out: Array = self.rows @ each[self.free] + each[self.base].sum()
        return out


class Windows:
    """Enumerates the downsets of a problem by window of work; raises :class:`TooMany` past ``most``."""

    def __init__(self, problem: Problem, tick: Callable[[], None], most: int) -> None:
        self.problem, self.tick, self.most = problem, tick, most
        self.works = np.array([i.work_ns for i in problem.items], dtype=np.int64)
        n = len(self.works)
        self.needed = _sums(_closures(problem.before, range(n)), self.works)
        self.barred = _sums(_closures(problem.after, range(n - 1, -1, -1)), self.works)

    def between(self, low: int, high: int, i: int) -> Downsets | None:
        """The downsets with work from ``low`` to ``high`` that hold what must be in the first ``i`` stages.

        None if there are none.
        """
        p, n = self.problem, len(self.works)
        base = self.works.sum() - self.barred < low
        base |= np.array([p.last_of(v) < i for v in range(n)], dtype=bool)
        out = self.needed > high
        out |= np.array([item.first >= i for item in p.items], dtype=bool)
        for v in range(n):
            out[v] |= any(out[u] for u in p.before[v])
            w = n - 1 - v
            base[w] |= any(base[x] for x in p.after[w])
        if (base & out).any():
            return None
        free = np.flatnonzero(~base & ~out)
        rows = self._branched(free, low - int(self.works[base].sum()), high - int(self.works[base].sum()))
        return Downsets(base, free, rows) if len(rows) else None

    def _branched(self, free: Array, low: int, high: int) -> Bits:
        """Free items in turn, left or taken; a set is dropped once its work cannot reach the window."""
        place = {v: x for x, v in enumerate(free.tolist())}
        held = np.zeros((1, len(free) // 64 + 1), dtype=np.uint64)
        work = np.zeros(1, dtype=np.int64)
        rest = int(self.works[free].sum())
        for v, x in place.items():
            self.tick()
            size = int(self.works[v])
            rest -= size
            can = work + size <= high
            for u in self.problem.before[v]:
                if u in place:
                    word, bit = divmod(place[u], 64)
                    can &= (held[:, word] >> np.uint64(bit)) & np.uint64(1) == 1
            left, taken = np.flatnonzero(work + rest >= low), np.flatnonzero(can)
            more = held[taken]
            more[:, x // 64] |= np.uint64(1 << x % 64)
            held = np.concatenate([held[left], more])
            work = np.concatenate([work[left], work[taken] + size])
            if len(work) > self.most:
                raise TooMany
        held = held[(work >= low) & (work <= high)]
        bits = np.unpackbits(held.view(np.uint8), axis=1, bitorder="little")
        return bits[:, : len(free)].astype(bool)


def _closures(beside: Sequence[Sequence[int]], order: Iterable[int]) -> list[int]:
    out = [0] * len(beside)
    for v in order:
        mask = 1 << v
        for u in beside[v]:
            mask |= out[u]
        out[v] = mask
    return out


def _sums(masks: Sequence[int], works: Array) -> Array:
    """The work of each set of items."""
    size = len(works) // 8 + 1
    out = np.zeros(len(works), dtype=np.int64)
    for v, mask in enumerate(masks):
        held = np.frombuffer(mask.to_bytes(size, "little"), dtype=np.uint8)
        out[v] = works[np.unpackbits(held, bitorder="little")[: len(works)].astype(bool)].sum()
    return out
