"""A problem without trifles: a relaxation that leaves far fewer places where a chain may be cut.

Guards of sizes, which nothing takes, may be in any stage after what they look at, and what is made of the
inputs alone in any before its takers: each of them multiplies the downsets of a model that is a chain
otherwise, and all of them together come to less than a load is known to. Searching is left to
``chains``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from .problem import Problem

__all__ = ["Trimmed", "trim"]

_PART = 1e-3
"""An answer near the optimum is known no closer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trimmed:
    """A separable problem, what is left of it, and its items that are left out: takers of nothing else first.

    Every assignment of the whole has the loads of ``problem`` at least, where stages may be empty of it.
    """

    whole: Problem
    problem: Problem
    kept: tuple[int, ...]
    ends: tuple[int, ...]
    starts: tuple[int, ...]

    def expand(self, stage_of: Sequence[int]) -> tuple[int, ...]:
        """The stage of each item of the whole: trifles are beside what they take, or their first taker.

        Stages that are empty of what is left, and may not be, they fill as far as their order lets them.
        """
        out = dict(zip(self.kept, stage_of, strict=True))
        stages = range(0 if self.whole.allow_empty else self.whole.n_stages)
        empty = sorted({*stages} - {*out.values()})
        for v in self.starts:
            last = min(out[w] for w in self.whole.after[v] if w in out)
            out[v] = max((s for s in empty if s <= last), default=last)
            empty = [s for s in empty if s != out[v]]
        for v in self.ends:
            first = max((out[u] for u in self.whole.before[v]), default=0)
            out[v] = min((s for s in empty if s >= first), default=first)
            empty = [s for s in empty if s != out[v]]
        return tuple(out[v] for v in range(len(out)))


def trim(problem: Problem, part: float = _PART) -> Trimmed | None:
    """The problem without its trifles that nothing takes, or that take nothing; None where it has none.

    They come to this ``part`` of a fair share of all work at most.

    Nor where fewer items than stages are left. From the last item on for the former, from the first for the
    latter, as long as all of them are trifles together. O(items + edges).
    """
    n, room = len(problem.items), int(part * problem.total_ns) // problem.n_stages
    gone: set[int] = set()
    sides: list[list[int]] = []
    for order, beside in ((range(n - 1, -1, -1), problem.after), (range(n), problem.before)):
        side = []
        for v in order:
            work_ns = problem.items[v].work_ns
            if v not in gone and work_ns <= room and _is_free(problem, v) and gone.issuperset(beside[v]):
                room -= work_ns
                gone.add(v)
                side.append(v)
        sides.append(side[::-1])
    kept = tuple(v for v in range(n) if v not in gone)
    if not gone or len(kept) < problem.n_stages:
        return None
    return Trimmed(problem, _without(problem, gone, kept), kept, *map(tuple, sides))


def _is_free(problem: Problem, v: int) -> bool:
    return bool(problem.items[v].ops) and not problem.items[v].first and problem.items[v].last < 0


def _without(problem: Problem, gone: Collection[int], kept: Sequence[int]) -> Problem:
    place = {v: x for x, v in enumerate(kept)}

    def those(items: Sequence[int]) -> tuple[int, ...]:
        return tuple(place[v] for v in items if v not in gone)

    nets = (
        dataclasses.replace(n, producer=place[n.producer], consumers=those(n.consumers))
        for n in problem.nets
        if n.producer not in gone
    )
    shares = (dataclasses.replace(s, items=those(s.items)) for s in problem.shares)
    return dataclasses.replace(
        problem,
        items=tuple(problem.items[v] for v in kept),
        edges=tuple((place[a], place[b]) for a, b in problem.edges if a not in gone and b not in gone),
        nets=tuple(n for n in nets if n.consumers),
        shares=tuple(s for s in shares if s.items),
    )
