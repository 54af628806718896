"""A problem's prices at the least that any assignment pays, so that each stage's load is its own.

What a problem costs is said by ``problem``; what the relaxed optimum is worth by ``chains`` and ``ranks``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from .problem import Net, Problem, scaled

__all__ = ["cheapest"]


def cheapest(problem: Problem) -> Problem:
    """The problem where every stage pays the least that its transfers can cost, whatever the others hold.

    Over unlike links, a stage pays at least what its cheapest to a later stage asks for what it sends, and
    from an earlier one for what it receives. Network interfaces that ranks share are left out.
    """
    shares = tuple(
        dataclasses.replace(s, sync_ns=min(s.sync_ns, *s.more_ns), more_ns=()) if s.more_ns else s
        for s in problem.shares
    )
    nets = problem.nets
    stages = tuple(dataclasses.replace(s, nic=-1) for s in problem.stages)
    if problem.pair_ns:
        kinds, tables = _links(problem)
        stages = tuple(dataclasses.replace(s, links=k) for s, k in zip(stages, kinds, strict=True))
        nets = tuple(dataclasses.replace(n, link_ns=row) for n, row in zip(nets, tables, strict=True))
    nets = tuple(_least(net, problem) for net in nets)
    return dataclasses.replace(
        problem, pair_ns=None, sender_pays="once", shares=shares, nets=nets, stages=stages
    )


def _links(problem: Problem) -> tuple[list[tuple[int, int]], list[tuple[tuple[int, int], ...]]]:
    """Each stage's kinds of link to later stages and from earlier ones, and each net's prices by kind.

    A kind is a set of tables of prices; its price is their least.
    """
    pairs = problem.pair_ns or {}
    tables = {id(rows): rows for rows in pairs.values()}
    ranks = [s.rank for s in problem.stages]
    onward = all(d > 0 for d in problem.directions)
    kinds: dict[frozenset[int], int] = {}

    def kind(those: Iterable[tuple[int, int]]) -> int:
        used = frozenset(id(pairs[pair]) for pair in those if pair[0] != pair[1])
        return kinds.setdefault(used or frozenset(tables), len(kinds))

    out = []
    for s, rank in enumerate(ranks):
        later, earlier = (ranks[s + 1 :], ranks[:s]) if onward else (ranks, ranks)
        out.append((kind((rank, there) for there in later), kind((there, rank) for there in earlier)))
    rows = []
    for n in range(len(problem.nets)):
        each = {x: table[n] for x, table in tables.items()}
        rows.append(tuple(tuple(map(min, zip(*(each[x] for x in used), strict=True))) for used in kinds))
    return out, rows


def _least(net: Net, problem: Problem) -> Net:
    """A value that is never dearer: where stages may compute it again, no one need send it."""
    if net.again_ns < 0:
        return net
    again = scaled(net.again_ns, max(s.speed for s in problem.stages))

    def least(receive_ns: int) -> int:
        return 0 if problem.overlap else min(receive_ns, again)

    links = tuple((0, least(receive)) for _, receive in net.link_ns)
    return dataclasses.replace(net, send_ns=0, receive_ns=least(net.receive_ns), again_ns=-1, link_ns=links)
