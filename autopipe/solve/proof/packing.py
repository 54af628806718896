"""What ranks that hold several stages are loaded with at least, were items free to lie in any order.

Most models are one layer many times over: a rank holds a whole number of those. Bounds that weigh transfers
are left to ``paths``.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

__all__ = ["packed"]

_APART = 5
"""So many items beside the alike ones are placed in every way; the rest may be cut to pieces."""


def packed(works: Sequence[int], n_ranks: int) -> int:
    """A bound on the fullest of so many alike ranks; the least there is where all but a few items are alike.

    By halving: within a bound, each way to place the few largest others leaves each rank room for whole
    items of the commonest kind, and all ranks together room for the rest.
    """
    counts = collections.Counter(w for w in works if w)
    if not counts:
        return 0
    layer = max(counts, key=lambda w: (w * counts[w], w))
    others = sorted((w for w in works if w and w != layer), reverse=True)
    piles = [*_piles(others[:_APART], n_ranks)]
    rest = sum(others[_APART:])

    def fits(bound: int) -> bool:
        return any(
            max(pile) <= bound
            and sum((bound - held) // layer for held in pile) >= counts[layer]
            and n_ranks * bound - sum(pile) - counts[layer] * layer >= rest
            for pile in piles
        )

    low, high = max(layer, -(-sum(works) // n_ranks)), sum(works)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _piles(items: Sequence[int], n_ranks: int) -> Iterator[tuple[int, ...]]:
    """What alike ranks hold under each way to spread some items over them."""
    if not items:
        yield (0,) * n_ranks
        return
    for pile in _piles(items[1:], n_ranks):
        for held in sorted(set(pile)):
            x = pile.index(held)
            yield (*pile[:x], held + items[0], *pile[x + 1 :])
