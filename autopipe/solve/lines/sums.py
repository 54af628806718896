"""What the fullest of the sums that bound a step comes to at least, over every chain of downsets.

Which sums those are is said by ``proof.step``: for each stage what those before it work, what it works itself
and what those after it work, weighed. Pricing stages is left to ``pairs``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from ..definition.blocks import UNDER
from ..definition.problem import Problem
from .exact import Chains
from .pairs import Floats, Layer, Loads
from .windows import TooMany

__all__ = ["least_sum"]

_DOWNSETS = 1 << 11
"""The most downsets of a window that are looked through."""
_CELLS = 1 << 23
"""The most pairs of them that are priced."""


def least_sum(
    problem: Problem, sums: Sequence[Sequence[float]], bound: int, aside: int, deadline: float
) -> tuple[float, float, tuple[int, ...]] | None:
    """The least that the largest sum may be where no load is over a bound, and a chain near it.

    The second is that of chains with a stage whose load is ``aside`` at most: infinite where there is none.

    ``sums``: a row for each stage of the weights of all loads, one for those before it, one for those after.
    What these come to is taken at its least for where the stage begins and ends, and of blocks that are
    computed again parts count. None where no chain is within the bound. Raises :class:`TooMany` where that
    is too much to look through, :class:`OutOfTime` past the deadline.
    """
    return _Sums(problem, bound, deadline).least(sums, aside)


class _Sums(Chains):
    """All chains of downsets whose every load is at most ``bound``."""

    def __init__(self, problem: Problem, bound: int, deadline: float) -> None:
        super().__init__(problem, bound, deadline, most=_DOWNSETS)
        # likes are the same for a bottleneck alone
        self.ordered, self.loads = self.problem, Loads(self.problem)
        self.alike, self.contained = (), None

    def least(
        self, sums: Sequence[Sequence[float]], aside: int
    ) -> tuple[float, float, tuple[int, ...]] | None:
        """The least largest sum, that of chains with a stage so small, and the chain of the first."""
        windows = self._windows()
        if windows is None:
            return None
        layers = [self._layer(window) for window in windows]
        if sum(len(a.work) * len(b.work) for a, b in itertools.pairwise(layers)) > _CELLS:
            raise TooMany
        tables = [self._table(s, layers[s], layers[s + 1]) for s in range(self.k)]
        before, after = [np.zeros(1)], [np.zeros(1)]
        for table in tables:
            before.append((before[-1][:, None] + table).min(axis=0, initial=np.inf))
        for table in reversed(tables):
            after.append((table + after[-1]).min(axis=1, initial=np.inf))
        after.reverse()
        value, beside, came = np.zeros(1), np.full(1, np.inf), []
        for s, table in enumerate(tables):
            row = sums[s]
            here = row[0] * before[s][:, None] if s else 0.0
            later = row[-1] * after[s + 1] if s + 1 < self.k else 0.0
            own = here + row[s] * table + later
            totals = np.maximum(value[:, None], own)
            small = np.where(table <= aside, totals, np.maximum(beside[:, None], own))
            came.append(totals.argmin(axis=0))
            value, beside = totals.min(axis=0), small.min(axis=0)
        if not np.isfinite(value[0]):
            return None
        stage_of = self._assignment([layer.downsets for layer in layers], came)
        return float(value[0] * UNDER), float(beside[0] * UNDER), stage_of

    def _table(self, s: int, a: Layer, b: Layer) -> Floats:
        """The least load of stage ``s`` for each pair; infinite over the bound."""
        self._tick()
        loads: Floats = self.loads.of(s, a, b).loads
        loads[loads > self.bound] = np.inf
        return loads
