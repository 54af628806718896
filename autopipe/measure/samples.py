"""Seconds measured so far, by op signature, and their keeping in a store between runs.

Taking the measurements is left to ``passes``.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import StoreError
from ..schema import Name, Real, build
from .store import Store

__all__ = ["Samples", "next_to_every", "typical"]

_NEXT_TO_EVERY = 10
_TAIL = 0.1
_MOST = 100
"""Samples kept per op and part; older ones make way."""


def typical(found: Sequence[float]) -> float:
    """The mean of some seconds, the highest tenth as long as what is next below; 0 for none.

    What runs many times in a step adds up to its mean: now and then it takes longer, never much shorter,
    and a step of many microbatches has some of the longest tenth. How long the longest are is chance.
    """
    most = _longest(found)
    return statistics.fmean(min(s, most) for s in found) if found else 0.0


def next_to_every(told: Iterable[bool]) -> bool:
    """Whether some findings tell something, of which one in ten may tell otherwise; False of none."""
    found = [*told]
    return bool(found) and found.count(False) <= len(found) // _NEXT_TO_EVERY


def _longest(found: Sequence[float]) -> float:
    """What the highest tenth counts for."""
    n_counted = len(found) - math.ceil(_TAIL * len(found))
    return sorted(found)[max(0, n_counted - 1)] if found else 0.0


class Samples:
    """``F`` (forward), ``B`` (backward) and ``I`` (its input part) seconds, one figure per op and pass.

    Keys are op signatures, so equal ops share their figures, in one model or in several. ``""`` is the
    model itself, run whole.

    Parameters
    ----------
    context: what else the seconds depend on: dims, device, dtype, versions. Part of every store key.
    model: the graph's digest, part of the key of the model's own figures.
    """

    def __init__(self, context: Mapping[str, Any], model: str, store: Store | None = None):
        self.context, self.model, self.store = dict(context), model, store
        self.by_key: dict[str, dict[str, list[float]]] = {}
        self.notes: list[str] = []

    def add(self, key: str, part: str, seconds: float) -> None:
        self.by_key.setdefault(key, {}).setdefault(part, []).append(seconds)

    def of(self, key: str, part: str) -> list[float]:
        return self.by_key.get(key, {}).get(part, [])

    def median(self, key: str, part: str) -> float:
        """The median; 0 for what was not measured."""
        found = self.of(key, part)
        return statistics.median(found) if found else 0.0

    def mean(self, key: str, part: str) -> float:
        """Their :func:`typical`; 0 for what was not measured."""
        return typical(self.of(key, part))

    def jitter_s(self, key: str, parts: Iterable[str]) -> float:
        """The variance of what several parts take, in square seconds for each second of them.

        Told by how far passes are from the one before: a machine that changes its pace over a profile makes
        no pass unlike its neighbours. The highest tenth counts as in :func:`typical`.
        """
        variance = total = 0.0
        for part in parts:
            found = self.of(key, part)
            most = _longest(found)
            steps = [min(b, most) - min(a, most) for a, b in itertools.pairwise(found)]
            if steps:
                variance += statistics.fmean(s * s for s in steps) / 2
                total += self.mean(key, part)
        return variance / total if total else 0.0

    def load(self, keys: Iterable[str]) -> None:
        """Takes up what earlier runs left in the store; what it refuses is noted and measured again."""
        if self.store is None:
            return
        for key in dict.fromkeys(keys):
            try:
                found = self.store.get("op", self._key(key))
                if found:
                    what = f"the measurement {self.store.path('op', self._key(key))}"
                    self.by_key[key] = build(dict[Name, list[Real]], found, what)
            except StoreError as error:
                self.notes.append(str(error))

    def save(self, keys: Iterable[str] | None = None) -> None:
        """Leaves everything measured so far, or what is kept under some keys, in the store."""
        if self.store is None:
            return
        for key in self.by_key if keys is None else keys:
            parts = self.by_key[key]
            self.store.put("op", self._key(key), {part: seconds[-_MOST:] for part, seconds in parts.items()})

    def _key(self, key: str) -> dict[str, Any]:
        return {**self.context, "signature": key} if key else {**self.context, "model": self.model}
