"""The optimum of a small problem whose loads hang together: item by item, least loads first.

Where a stage's load depends on what others hold (unlike links, senders paid per receiver, ties of many,
values computed again in some stages), this closes what the relaxed proof leaves open.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ..definition.answer import Answer
from ..definition.blocks import freed_bytes
from ..definition.contract import kept_rows
from ..definition.problem import HUGE, Problem
from ..stopping import clock_s

__all__ = ["close", "is_small"]

_CHAINS = 20_000
"""Up to so many cuts of a line of as many items, problems are small."""

_ITEMS = 100
"""Up to so many items are placed one by one in larger problems."""


def is_small(problem: Problem) -> bool:
    """Whether so few chains or items are there that :func:`close` may look at them."""
    n, k = len(problem.items), problem.n_stages
    return n <= _ITEMS or math.comb(n + k - 1, k - 1) <= _CHAINS


def close(problem: Problem, known: Answer, deadline: float) -> Answer:
    """The best assignment, proved, where the problem is small and time suffices; else the best known.

    Larger problems are searched where nothing is known, and where ranks hold several stages.

    Items are placed in order. Loads never fall as items are added, so what is placed bounds what follows.
    Only ranks of several stages that choose blocks to compute again may come to choose better ones: until
    all items are placed, theirs are free.
    """
    n, k = len(problem.items), problem.n_stages
    is_small = math.comb(n + k - 1, k - 1) <= _CHAINS
    is_open = known.stage_of is None or not problem.one_stage_per_rank
    if known.proved or not (is_small or (n <= _ITEMS and is_open)):
        return known
    bound = problem if problem.one_stage_per_rank else _without_blocks(problem)
    parts = [*(_first(bound, m) for m in range(1, n)), problem]
    best, floor = known, HUGE
    stack: list[tuple[int, ...]] = [()]
    while clock_s() < deadline:
        if not stack:
            return dataclasses.replace(best, lower_ns=min(best.bottleneck_ns, floor))
        stage_of = stack.pop()
        found = []
        for there in _choices(problem, stage_of):
            longer = (*stage_of, there)
            if _leaves_empty(problem, longer):
                continue
            part = parts[len(stage_of)]
            loads = part.loads(longer)
            least = part.least(loads)
            if least >= min(best.bottleneck_ns, HUGE):
                continue
            if len(longer) < n:
                found.append((least, longer))
            elif problem.is_valid(longer):
                value = problem.bottleneck(loads)
                floor = min(floor, least) if least < value else floor
                best = Answer(longer, value, best.lower_ns) if value < best.bottleneck_ns else best
        stack += [longer for _, longer in sorted(found, reverse=True)]
    return best


def _choices(problem: Problem, stage_of: Sequence[int]) -> range:
    """The stages that order and pins allow the next item."""
    v = len(stage_of)
    first = max((stage_of[u] for u in problem.before[v]), default=0)
    return range(max(first, problem.items[v].first), problem.last_of(v) + 1)


def _leaves_empty(problem: Problem, stage_of: Sequence[int]) -> bool:
    """Whether fewer items are left to place than stages without any, where every stage must hold one."""
    n_left = sum(bool(i.ops) for i in problem.items[len(stage_of) :])
    used = {s for s, i in zip(stage_of, problem.items, strict=False) if i.ops}
    return not problem.allow_empty and problem.n_stages - len(used) > n_left


def _without_blocks(problem: Problem) -> Problem:
    """The problem where what blocks may give up is not saved at all."""
    if problem.recompute != "auto":
        return problem
    items = (
        dataclasses.replace(i, saved_bytes=i.saved_bytes - freed_bytes(i.blocks), blocks=())
        for i in problem.items
    )
    return dataclasses.replace(problem, items=tuple(items))


def _first(problem: Problem, m: int) -> Problem:
    """The problem of the first ``m`` items alone."""
    inside = range(m)
    nets = [
        (n, dataclasses.replace(net, consumers=tuple(v for v in net.consumers if v in inside)))
        for n, net in enumerate(problem.nets)
        if net.producer in inside and any(v in inside for v in net.consumers)
    ]
    shares = (dataclasses.replace(s, items=tuple(v for v in s.items if v in inside)) for s in problem.shares)
    pairs = problem.pair_ns and kept_rows(problem.pair_ns, [n for n, _ in nets])
    return dataclasses.replace(
        problem,
        items=problem.items[:m],
        edges=tuple((a, b) for a, b in problem.edges if b < m),
        nets=tuple(net for _, net in nets),
        shares=tuple(s for s in shares if s.items),
        pair_ns=pairs,
    )
