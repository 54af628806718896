"""What no plan can do without, where ranks have too little room for it: told without a search.

Each is a condition on what stages hold that every assignment meets which fits. What else memory leaves is
left to ``memory``, words for it to ``infeasible``.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Literal

import numpy as np

from ..definition.blocks import freed_bytes
from ..definition.problem import HUGE, Array, Problem, memory_bytes, peak_bytes
from .filling import windows
from .memory import part_with_room

__all__ = ["Shortage", "between_steps", "shortage"]

_NO_PLACE = 2 * HUGE
"""More than any item is over the limit of a stage it may be in."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shortage:
    """Bytes that some stages hold at least, between steps and beside, and their ranks' room for both.

    ``what`` they are of: ``"all"`` items; ``"all, placed"`` where pins let them be; ``"some"`` that may be in
    no stage but ``first`` to ``last``; ``"one"``, of the stages it may be in where it is least over; or the
    ``"least"`` that a stage may hold, which is with its ``item``. ``n_ranks`` have the stages.
    """

    what: Literal["all", "all, placed", "some", "one", "least"]
    static_bytes: int
    beside_bytes: int
    room_bytes: int
    first: int = 0
    last: int = -1
    item: int = -1

    n_ranks: int = 1

    @property
    def least_bytes(self) -> int:
        """What would be needed at least."""
        return self.static_bytes + self.beside_bytes

    @property
    def each_bytes(self) -> int:
        """What each rank would need more at least, were it as much on all; 0 where that is unknown."""
        if self.what == "all, placed":  # limits of the same proportions alone are known to be too little
            return 0
        return -(-(self.least_bytes - self.room_bytes) // self.n_ranks)


def shortage(problem: Problem, deadline: float) -> Shortage | None:
    """What is short however items are placed, where that is known without placing them; else None.

    O(items · stages), and a linear program (:func:`part_with_room`) until the deadline.
    """
    if all(s.limit_bytes >= HUGE for s in problem.stages):
        return None
    if short := between_steps(problem):
        return short
    limits = _room(problem, 0, problem.n_stages - 1)
    room, static = sum(limits), sum(p.static_bytes for p in problem.parts)
    spans = windows(problem)
    if any(first > last for first, last in spans):
        return None
    found = _of_items(problem, spans) or _of_some(problem, spans, everywhere=False)
    if found is not None:
        return found
    part = part_with_room(problem, deadline)
    if not 0 < part < 1:
        return _of_some(problem, spans, everywhere=True)
    anywhere = tuple(dataclasses.replace(i, first=0, last=-1) for i in problem.items)
    free = (
        part
        if anywhere == problem.items
        else part_with_room(dataclasses.replace(problem, items=anywhere), deadline)
    )
    if 0 < free < 1:
        return Shortage("all", static, _needed(room, free) - static, room, n_ranks=len(limits))
    return Shortage("all, placed", static, _needed(room, part) - static, room, n_ranks=len(limits))


def between_steps(problem: Problem) -> Shortage | None:
    """What all items hold between steps, where all ranks have less room together; else None."""
    limits = _room(problem, 0, problem.n_stages - 1)
    static = sum(p.static_bytes for p in problem.parts)
    return Shortage("all", static, 0, sum(limits), n_ranks=len(limits)) if static > sum(limits) else None


def _needed(room: int, part: float) -> int:
    """Bytes of which the room is such a part."""
    return max(room + 1, math.floor(room / part))


def _room(problem: Problem, first: int, last: int) -> list[int]:
    """The limits of the ranks that have one of the stages."""
    return list({s.rank: s.limit_bytes for s in problem.stages[first : last + 1]}.values())


def _of_items(problem: Problem, spans: list[tuple[int, int]]) -> Shortage | None:
    """An item that no stage has room for, or a stage that has no room for any.

    The first item of a stage receives all that it takes from earlier ones, in two buffers.
    """
    static, held = _alone(problem)
    limits = np.array([s.limit_bytes for s in problem.stages])
    over = held - limits
    stages = np.arange(problem.n_stages)
    first, last = np.array(spans).T
    over[(stages < first[:, None]) | (stages > last[:, None])] = _NO_PLACE
    v = int(over.min(axis=1).argmax())
    s = int(over[v].argmin())
    if over[v, s] > 0:
        return Shortage("one", int(static[v]), int(held[v, s] - static[v]), int(limits[s]), s, s, v)
    if problem.allow_empty:
        return None
    over += 2 * _received(problem)[:, None]
    s = int(over.min(axis=0).argmax())
    v = int(over[:, s].argmin())
    if not 0 < over[v, s] < _NO_PLACE:
        return None
    return Shortage("least", int(static[v]), int(over[v, s] + limits[s] - static[v]), int(limits[s]), s, s, v)


def _alone(problem: Problem) -> tuple[Array, Array]:
    """Per item what it holds between steps, and per stage the least that one which has it holds in all."""
    p = problem
    own = [(i, *(p.shares[x] for x in shares)) for i, shares in zip(p.items, p.shares_of, strict=True)]
    static, saved = (
        np.array([sum(getattr(part, name) for part in parts) for parts in own], dtype=np.int64)
        for name in ("static_bytes", "saved_bytes")
    )
    acting = np.array([peak_bytes(p, v) for v in range(len(own))], dtype=np.int64)
    alive = np.array([s.in_flight for s in p.stages])
    if not p.one_stage_per_rank:
        # what is there beside does not come at one moment
        alive, acting = alive * (p.recompute == "never"), 0 * acting
    kept, again = memory_bytes(alive, static[:, None], saved[:, None], acting[:, None], 0, 0)
    if p.recompute == "never":
        return static, kept
    least = again if p.recompute == "always" else np.minimum(kept, again)
    if not p.one_stage_per_rank:
        least = np.repeat(static[:, None], p.n_stages, axis=1)
    elif p.has_blocks:
        freed = np.array([freed_bytes(i.blocks) for i in p.items], dtype=np.int64)
        redone = np.array([min((b.saved_bytes for b in i.blocks), default=0) for i in p.items])
        least = np.minimum(least, kept - alive * freed[:, None] + redone[:, None])
    return static, least


def _received(problem: Problem) -> Array:
    """What each item receives where nothing that it takes is made in its stage."""
    out, edges = np.zeros(len(problem.items), dtype=np.int64), set(problem.edges)
    for net in problem.nets:
        for v in net.consumers:
            if net.again_ns < 0 and (net.producer, v) in edges:
                out[v] += net.n_bytes
    return out


def _of_some(problem: Problem, spans: list[tuple[int, int]], *, everywhere: bool) -> Shortage | None:
    """Items that have no other stages than some whose ranks lack room for them; those that lack most.

    What several hold counts once, and what they save where nothing is computed again. ``everywhere``: of all
    stages, else of fewer.
    """
    p = problem
    keeps = p.recompute == "never" and p.one_stage_per_rank
    alive = [s.in_flight * keeps for s in p.stages]
    held: dict[tuple[int, int], tuple[int, int]] = {}
    for item, (first, last) in zip(p.items, spans, strict=True):
        static, beside = held.get((first, last), (0, 0))
        saved = item.saved_bytes * min(alive[first : last + 1])
        held[first, last] = static + item.static_bytes, beside + saved
    shares = collections.Counter[frozenset[tuple[int, int]]]()
    for share in p.shares:
        shares[frozenset(spans[v] for v in share.items)] += share.static_bytes
    whole, found = (0, p.n_stages - 1), list[Shortage]()
    for first in sorted({first for first, _ in held} | {0}):
        for last in sorted({last for _, last in held if last >= first} | {p.n_stages - 1}):
            inside = [there for (a, b), there in held.items() if first <= a and b <= last]
            static, beside = (sum(row) for row in zip((0, 0), *inside, strict=True))
            static += sum(
                n_bytes for at, n_bytes in shares.items() if any(first <= a and b <= last for a, b in at)
            )
            limits = _room(p, first, last)
            room = sum(limits)
            if static + beside > room and ((first, last) == whole) is everywhere:
                what: Literal["all", "some"] = "all" if everywhere else "some"
                found.append(Shortage(what, static, beside, room, first, last, n_ranks=len(limits)))
    return max(found, key=lambda short: short.least_bytes - short.room_bytes, default=None)
