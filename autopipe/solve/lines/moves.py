"""Assignments made better by moves: to fit memory first, then to lower the fullest ranks' loads.

Which moves a step is simulated for is left to ``step``, first answers to ``intervals``, new cuts of several
stages at once to ``ranks``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from ..definition.answer import OutOfTime
from ..definition.problem import HUGE, Problem
from ..definition.relaxed import all_received, apart, cheapest
from ..proof.bounds import lower_bound
from ..stopping import clock_s
from .intervals import near_chain
from .room import roomy_chain

__all__ = ["carried", "fitting", "improve", "neighbours", "past"]


def neighbours(problem: Problem, stage_of: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every valid assignment that differs by one item moved to the next or the previous stage."""
    for v, s in enumerate(stage_of):
        for there, beside in ((s + 1, problem.after[v]), (s - 1, problem.before[v])):
            if 0 <= there < problem.n_stages and not any(stage_of[u] == s for u in beside):
                moved = (*stage_of[:v], there, *stage_of[v + 1 :])
                if problem.is_valid(moved):
                    yield moved


def carried(problem: Problem, stage_of: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every valid assignment where an item has gone to another stage with all that must go with it.

    To near stages first, and there those that move few items.
    """
    held = [0] * problem.n_stages
    for v, s in enumerate(stage_of):
        held[s] |= 1 << v
    upto = list(itertools.accumulate(held, int.__or__))
    for far in range(1, problem.n_stages):
        found: set[tuple[int, int]] = set()
        for v, s in enumerate(stage_of):
            if s + far < problem.n_stages:
                found.add((problem.below[v] & upto[s + far - 1], s + far))
            if s >= far:
                found.add((problem.above[v] & ~upto[s - far], s - far))
        for moving, there in sorted(found, key=lambda move: (move[0].bit_count(), move)):
            moved = tuple(there if moving >> v & 1 else s for v, s in enumerate(stage_of))
            if problem.is_valid(moved):
                yield moved


def past(problem: Problem, stage_of: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every valid assignment where all items of a stage have gone past those of the stages beside it.

    These close up: each is a stage nearer to where the first was. What is no op, the output, stays.
    """
    k, items = problem.n_stages, problem.items
    last, first = [k - 1] * k, [0] * k
    for a, b in problem.edges:
        s, t = stage_of[a], stage_of[b]
        if s < t and items[a].ops and items[b].ops:
            last[s], first[t] = min(last[s], t - 1), max(first[t], s + 1)
    for s in range(k):
        for there in (*range(s + 1, last[s] + 1), *range(s - 1, first[s] - 1, -1)):
            place = list(range(k))
            place.insert(there, place.pop(s))
            goes = {t: x for x, t in enumerate(place)}
            moved = tuple(goes[t] if items[v].ops else t for v, t in enumerate(stage_of))
            if problem.is_valid(moved):
                yield moved


def swaps(problem: Problem, stage_of: tuple[int, ...]) -> Iterator[tuple[int, ...] | None]:
    """Every assignment where two items of different stages have changed places, None for one not valid.

    Of many items hardly any is, so whoever takes them may look at the clock between.
    """
    for v, w in itertools.combinations(range(len(stage_of)), 2):
        if stage_of[v] != stage_of[w]:
            moved = list(stage_of)
            moved[v], moved[w] = moved[w], moved[v]
            yield tuple(moved) if problem.is_valid(moved) else None


def improve(problem: Problem, stage_of: Sequence[int], deadline: float) -> tuple[int, ...]:
    """Moves one item at a time over a cut while that lowers bytes over limits, then the fullest loads.

    While bytes are over limits, two items may change places too.
    """
    best, value = tuple(stage_of), _score(problem, stage_of)
    improved = True
    while improved:
        improved = False
        ways = neighbours(problem, best)
        for moved in itertools.chain(ways, swaps(problem, best)) if value[0] else ways:
            if clock_s() > deadline:
                return best
            if moved is None:
                continue
            after = _score(problem, moved)
            if after < value:
                best, value, improved = moved, after, True
                break
    return best


def fitting(problem: Problem, order: Sequence[int], deadline: float) -> tuple[int, ...] | None:
    """An assignment that fits: a chain of an order, or by moves from those whose bytes and loads are even."""
    if problem.one_stage_per_rank and (problem.has_blocks or not problem.is_separable):
        form, now = cheapest(all_received(problem)), clock_s()
        roomy = roomy_chain(problem, form, order, 0, now, deadline)
        if roomy is not None:
            return roomy
    free = dataclasses.replace(apart(problem, limited=False), recompute="never")
    with contextlib.suppress(OutOfTime):
        for even in (_by_bytes(free), free):
            found = near_chain(even, order, lower_bound(even), deadline)
            moved = found and improve(problem, found[1], deadline)
            if moved and problem.bottleneck(problem.loads(moved)) < HUGE:
                return moved
    return None


def _score(problem: Problem, stage_of: Sequence[int]) -> tuple[int, ...]:
    """Bytes over all limits, then the loads of ranks and shared interfaces, fullest first."""
    loads = problem.loads(stage_of)
    over = sum(
        max(0, problem.rank_bytes(rank, [loads[s] for s in own]) - problem.stages[own[0]].limit_bytes)
        for rank, own in problem.stages_of.items()
    )
    return (over, *sorted(problem.loads_of(loads), reverse=True))


def _by_bytes(problem: Problem) -> Problem:
    """The problem whose loads are bytes, with as many microbatches in flight as the middle stage has."""
    alive = sorted(s.in_flight for s in problem.stages)[problem.n_stages // 2]
    items = (
        dataclasses.replace(
            i, forward_ns=i.static_bytes + alive * i.saved_bytes, backward_ns=0, blocks=(), host_ns=(0, 0)
        )
        for i in problem.items
    )
    nets = (dataclasses.replace(n, send_ns=0, receive_ns=0) for n in problem.nets)
    stages = tuple(dataclasses.replace(s, speed=1.0) for s in problem.stages)
    return dataclasses.replace(problem, items=tuple(items), nets=tuple(nets), shares=(), stages=stages)
