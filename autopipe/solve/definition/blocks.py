"""Blocks of a stage to compute again in backward: the cheapest that give up enough memory, exactly.

What a stage needs is left to ``problem``; computing blocks again to ``stages``.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence

__all__ = [
    "UNDER",
    "Block",
    "Cheapest",
    "cheapest_blocks",
    "freed_bytes",
    "least_again",
    "redone_bytes",
    "sorts_of",
]

UNDER = 1 - 1e-9
"""What a bound in floating point is multiplied by, so that it is one."""

_STEPS = 1_000
"""Choices looked at for one stage; past them a choice comes with a bound."""


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Ops that are computed again together: their forward, what they save, what is kept in its place."""

    ops: tuple[str, ...]
    forward_ns: int
    saved_bytes: int
    held_bytes: int

    @property
    def freed_bytes(self) -> int:
        """What each microbatch in flight need not keep."""
        return self.saved_bytes - self.held_bytes


def freed_bytes(blocks: Iterable[Block]) -> int:
    """What a microbatch in flight need not keep of blocks that are computed again."""
    return sum(b.freed_bytes for b in blocks)


def redone_bytes(blocks: Iterable[Block]) -> int:
    """What lies beside the rest while the largest of the blocks is computed again: they come in turn."""
    return max((b.saved_bytes for b in blocks), default=0)


@dataclasses.dataclass(frozen=True, slots=True)
class Cheapest:
    """Blocks to compute again, and the least forward that any choice takes: theirs, unless cut off."""

    blocks: tuple[Block, ...]
    least_ns: int


def cheapest_blocks(blocks: Sequence[Block], in_flight: int, over_bytes: int) -> Cheapest | None:
    """The blocks with the least forward that bring a stage down by so many bytes; None where none do."""
    found = _cheapest(sorts_of(blocks), in_flight, over_bytes)
    if found is None:
        return None
    largest, left = found[0], dict(found[1])
    out = []
    for b in blocks:
        if b.saved_bytes <= largest and left.get((b.forward_ns, b.freed_bytes), 0) > 0:
            left[b.forward_ns, b.freed_bytes] -= 1
            out.append(b)
    return Cheapest(tuple(out), found[2])


def least_again(sorts: tuple[Sort, ...], in_flight: int, over_bytes: int) -> int | None:
    """The least forward of blocks that bring a stage down by so many bytes; None where none do."""
    found = _cheapest(sorts, in_flight, over_bytes)
    return None if found is None else found[2]


def sorts_of(blocks: Iterable[Block]) -> tuple[Sort, ...]:
    """The blocks by what they are, and how many of each."""
    counts = collections.Counter((b.forward_ns, b.freed_bytes, b.saved_bytes) for b in blocks)
    return tuple((*sort, count) for sort, count in sorted(counts.items()))


@functools.lru_cache(maxsize=1 << 12)
def _cheapest(
    sorts: tuple[Sort, ...], in_flight: int, over_bytes: int
) -> tuple[int, tuple[tuple[tuple[int, int], int], ...], int] | None:
    """The largest block allowed, how many of each kind of them to take, and the least that any choice takes.

    What is saved is for each microbatch in flight, what is computed again for one. A knapsack for each size
    of the largest block, by branch and bound (Kellerer, Pferschy, Pisinger, "Knapsack Problems", 2004, §2.4):
    kinds of blocks by rising time per byte, more of the better kinds first, cut off where even parts of
    blocks would cost more than the best known.
    """
    best: tuple[int, int, tuple[tuple[tuple[int, int], int], ...]] | None = None
    least: int | None = None
    for largest in sorted({saved for _, _, saved, _ in sorts}, reverse=True):
        kinds = _kinds(sort for sort in sorts if sort[2] <= largest)
        known = None if best is None else best[0]
        cost, counts, bound = _cover(kinds, -(-(over_bytes + largest) // in_flight), known)
        if cost is not None:
            best = cost, largest, tuple(zip((kind[:2] for kind in kinds), counts, strict=True))
        if bound is not None:
            least = bound if least is None else min(least, bound)
    if best is None:
        return None
    return best[1], best[2], best[0] if least is None else min(least, best[0])


Kind = tuple[int, int, int]
"""Forward, bytes given up, and how many such blocks there are."""

Sort = tuple[int, int, int, int]
"""Forward, bytes given up, bytes saved, and how many such blocks there are."""


def _kinds(sorts: Iterable[Sort]) -> tuple[Kind, ...]:
    counts: collections.Counter[tuple[int, int]] = collections.Counter()
    for forward, freed, _, count in sorts:
        counts[forward, freed] += count
    return tuple((*pair, counts[pair]) for pair in sorted(counts, key=lambda p: (p[0] / p[1], -p[1])))


@functools.lru_cache(maxsize=1 << 11)
def _cover(
    kinds: tuple[Kind, ...], need: int, known: int | None
) -> tuple[int | None, tuple[int, ...], int | None]:
    """The least forward under ``known`` that gives up ``need`` bytes, and how many blocks of each kind.

    Third, where the search was cut off: the least that what it did not look at can cost.
    """
    rest = list(itertools.accumulate((f * n for _, f, n in reversed(kinds)), initial=0))[::-1]
    best, found = known, None
    stack: list[tuple[int, int, int, tuple[int, ...]]] = [(_parts_ns(kinds, 0, need), need, 0, ())]
    # without the first way down nothing is known
    for _ in range(_STEPS + len(kinds)):
        if not stack:
            break
        bound, left, cost, counts = stack.pop()
        if best is not None and bound >= best:
            continue
        if left <= 0:
            best, found = cost, counts + (0,) * (len(kinds) - len(counts))
            continue
        if rest[len(counts)] < left:
            continue
        forward, freed, count = kinds[len(counts)]
        for n in range(min(count, -(-left // freed)) + 1):
            after, paid = left - n * freed, cost + n * forward
            stack.append((paid + _parts_ns(kinds, len(counts) + 1, after), after, paid, (*counts, n)))
    unseen = min((row[0] for row in stack), default=None)
    return (None, (), unseen) if found is None else (best, found, unseen)


def _parts_ns(kinds: Sequence[Kind], first: int, left: int) -> int:
    """The least forward that gives up so many bytes where parts of blocks may be taken."""
    total = 0
    for forward, freed, count in itertools.islice(kinds, first, None):
        if left <= count * freed:
            return total + max(0, -(-left * forward // freed))
        total, left = total + count * forward, left - count * freed
    return total
