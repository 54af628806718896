"""What follows from some things coming before others: all that each reaches, and orders that respect it.

Which items come before which is said by ``problem``.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence

__all__ = ["closures", "in_order"]


def closures(beside: Sequence[Sequence[int]], order: Iterable[int]) -> list[int]:
    """Per item, as bits: itself and all that it reaches, in an order that comes to those first."""
    out = [0] * len(beside)
    for v in order:
        mask = 1 << v
        for u in beside[v]:
            mask |= out[u]
        out[v] = mask
    return out


def in_order(after: Sequence[Sequence[int]], key: Callable[[int, int], tuple[int, ...]]) -> tuple[int, ...]:
    """A topological order of what comes before what: ready items by least key.

    The key also sees how many came before when the item became ready.
    """
    waiting = [0] * len(after)
    for v in itertools.chain.from_iterable(after):
        waiting[v] += 1
    heap = [(key(v, 0), v) for v, n in enumerate(waiting) if n == 0]
    heapq.heapify(heap)
    out: list[int] = []
    while heap:
        _, v = heapq.heappop(heap)
        out.append(v)
        for w in after[v]:
            waiting[w] -= 1
            if waiting[w] == 0:
                heapq.heappush(heap, (key(w, len(out)), w))
    return tuple(out)
