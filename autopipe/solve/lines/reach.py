"""The stages that each item may be in where no load exceeds a bound.

Items with too much work between them lie in different stages, and what must come before or after an item
takes stages too. Which downsets that leaves is left to ``windows``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ..definition.problem import Array, Problem, most_work

__all__ = ["Bits", "Reach"]

Bits = npt.NDArray[np.bool_]

_MANY_ITEMS = 1 << 10
"""The work between all pairs of more items than this takes too long."""


class Reach:
    """What each item needs before it and bars after it, and the stages that leaves.

    ``tick`` is called now and then, to stop what takes too long.
    """

    def __init__(self, problem: Problem, tick: Callable[[], None]) -> None:
        self.problem, self.tick, n = problem, tick, len(problem.items)
        self.works = np.array([i.work_ns for i in problem.items], dtype=np.int64)
        self.needed = self._works(range(n), problem.before, problem.above)
        self.barred = self._works(range(n - 1, -1, -1), problem.after, problem.below)
        self.below: Bits | None = None
        if n <= _MANY_ITEMS:
            self.below = np.array([_bits(mask, n) for mask in problem.below]).reshape(n, n)

    def _works(self, order: Sequence[int], beside: Sequence[Sequence[int]], sets: Sequence[int]) -> Array:
        """The work of each item's set: that of the set beside it with most, and of what it has besides.

        ``order`` has those beside an item first. Along a chain a set has one item besides.
        """
        out, works = [0] * len(self.works), self.works.tolist()
        for v in order:
            self.tick()
            near = max(beside[v], key=out.__getitem__, default=None)
            rest = sets[v] if near is None else sets[v] & ~sets[near]
            own = works[v] if rest == 1 << v else int(self.works[_bits(rest, len(works))].sum())
            out[v] = own if near is None else out[near] + own
        return np.array(out, dtype=np.int64)

    def stages(self, bound: int, windows: Sequence[tuple[int, int]]) -> tuple[Array, Array] | None:
        """The first and the last stage of each item; None where an item has none.

        ``windows``: the least and the most work before each cut.
        """
        p, n = self.problem, len(self.works)
        first = np.array([item.first for item in p.items], dtype=np.int64)
        last = np.array([p.last_of(v) for v in range(n)], dtype=np.int64)
        total = self.works.sum()
        for i in range(1, p.n_stages):
            low, high = windows[i]
            first[self.needed > high] = np.maximum(first[self.needed > high], i)
            early = total - self.barred < low
            last[early] = np.minimum(last[early], i - 1)
        apart = self._apart(most_work(bound, max(s.speed for s in p.stages)))
        for v in range(n):
            w = n - 1 - v
            first[v] = max([first[v], *(first[u] for u in p.before[v])])
            last[w] = min([last[w], *(last[x] for x in p.after[w])])
            if apart is not None:
                first[v] = max(first[v], (first + 1)[apart[:, v]].max(initial=0))
                last[w] = min(last[w], (last - 1)[apart[w]].min(initial=p.n_stages))
        return (first, last) if (first <= last).all() else None

    def _apart(self, most: int) -> Bits | None:
        """Whether one item must come before another, and with what is between is too much for a stage."""
        if self.below is None:
            return None
        each = self.below.astype(np.float64)
        out: Bits = self.below & ((each * self.works) @ each > most)
        return out


def _bits(mask: int, n: int) -> Bits:
    held = np.frombuffer(mask.to_bytes(n // 8 + 1, "little"), dtype=np.uint8)
    return np.unpackbits(held, bitorder="little")[:n].astype(bool)
