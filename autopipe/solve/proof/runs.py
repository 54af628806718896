"""A model's items by kind, and in runs that a cut goes through at most one of.

Models are mostly one layer after the other: what lies between two turns of one kind of item is a run. What
memory holds of them is left to ``memory``.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence

from ..definition.problem import Problem

__all__ = ["Block", "Kind", "Run", "runs_of"]

Block = tuple[int, int]
"""The forward of ops that may be computed again, and the bytes that gives up."""

_TURNS = 8
"""So many kinds of items are looked at as what lies between runs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """Items, or what several stages hold, that are alike."""

    forward_ns: int
    work_ns: int
    static_bytes: int
    saved_bytes: int
    first: int
    last: int
    blocks: tuple[Block, ...] = ()


Run = tuple[tuple[Kind, int], ...]
"""The kinds of items that lie between two cuts, and how many of each."""


def _kinds(problem: Problem) -> list[Kind]:
    """What each item costs."""
    out = []
    for v, i in enumerate(problem.items):
        blocks = tuple(sorted((b.forward_ns, b.freed_bytes) for b in i.blocks))
        out.append(
            Kind(i.forward_ns, i.work_ns, i.static_bytes, i.saved_bytes, i.first, problem.last_of(v), blocks)
        )
    return out


def runs_of(problem: Problem) -> Iterator[Run]:
    """Items by what lies between those of the commonest kind that come one after the other; others alone.

    So are all where ranks hold several stages, and what several stages hold.
    """
    kinds, last = _kinds(problem), problem.n_stages - 1
    for s in problem.shares:
        work_ns = s.forward_ns + s.backward_ns
        yield ((Kind(s.forward_ns, work_ns, s.static_bytes, s.saved_bytes, 0, last), 1),)
    left = (1 << len(kinds)) - 1
    if problem.one_stage_per_rank:
        for inside in _between(problem, kinds):
            members = [kinds[v] for v in _bits(inside)]
            yield tuple(sorted(collections.Counter(members).items(), key=str))
            left &= ~inside
    yield from (((kinds[v], 1),) for v in _bits(left))


def _bits(inside: int) -> Iterator[int]:
    """The places of the bits that are set."""
    while inside:
        lowest = inside & -inside
        yield lowest.bit_length() - 1
        inside ^= lowest


def _between(problem: Problem, kinds: Sequence[Kind]) -> list[int]:
    """As bits, the items before the first of the turns, from each to the next, and after the last.

    A turn is never in a later stage than the next one, so no two of these lie on both sides of one cut. Of
    the commonest kinds, turns are of the one that leaves the least work outside of them.
    """
    counts = collections.Counter(kinds)
    best: tuple[tuple[int, int, int], list[int]] | None = None
    for kind in sorted(counts, key=lambda kind: -counts[kind] * kind.work_ns)[:_TURNS]:
        out, last = list[int](), -1
        after = full = (1 << len(kinds)) - 1
        for v in (v for v, other in enumerate(kinds) if other == kind):
            if last < 0 or problem.above[v] >> last & 1:
                out.append(after & problem.above[v])
                after, last = problem.below[v] & ~(1 << v), v
        out.append(after)
        left = full & ~functools.reduce(int.__or__, out)
        work = sum(kinds[v].work_ns for v in _bits(left))
        rank = work, -min(len(out), 6 * problem.n_stages), len(out)
        if best is None or rank < best[0]:
            best = rank, out
    return [inside for inside in best[1] if inside] if best else []
