"""A problem's prices at the least that any assignment pays, so that each stage's load is its own.

What a problem costs is said by ``problem``; what the relaxed optimum is worth by ``chains`` and ``ranks``.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import TypeVar

from .problem import HUGE, Item, Net, Problem, Share, scaled

__all__ = ["all_received", "apart", "at_one_pace", "cheapest", "holds_less", "needs_more", "working"]

Part = TypeVar("Part", Item, Share)


def cheapest(problem: Problem) -> Problem:
    """The problem where every stage pays the least that its transfers can cost, whatever the others hold.

    Over unlike links, a stage pays at least what its cheapest to a later stage asks for what it sends, and
    from an earlier one for what it receives. Network interfaces that ranks share are left out. Where hosts
    may be slower than their devices, only those of the two count that take longer for all of it.
    """
    if problem.has_hosts:
        by_hosts = sum(sum(p.host_ns) - p.forward_ns - p.backward_ns for p in problem.parts) > 0
        problem = _paced(problem, by_hosts)
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
        problem,
        pair_ns=None,
        link_of=None,
        sender_pays="once",
        shares=shares,
        nets=nets,
        stages=stages,
    )


def at_one_pace(problem: Problem) -> Problem:
    """The problem without its hosts, or without its devices, where these are slower nowhere."""
    ahead = []
    for part in problem.parts:
        forward_ns = part.forward_ns - part.host_ns[0]
        ahead += [forward_ns, forward_ns + part.backward_ns - part.host_ns[1]]  # also where it runs again
    is_one = problem.has_hosts and (min(ahead) >= 0 or max(ahead) <= 0)
    return _paced(problem, by_hosts=min(ahead) < 0) if is_one else problem


def working(problem: Problem) -> Problem:
    """The problem whose loads are what devices work: nothing that is sent or synchronised takes time."""
    free = cheapest(_paced(problem, by_hosts=False))
    return dataclasses.replace(
        free,
        nets=tuple(dataclasses.replace(n, send_ns=0, receive_ns=0, link_ns=()) for n in free.nets),
        shares=tuple(dataclasses.replace(s, sync_ns=0, more_ns=(), link_ns=()) for s in free.shares),
        stages=tuple(dataclasses.replace(s, links=(0, 0)) for s in free.stages),
    )


def apart(problem: Problem, *, limited: bool) -> Problem:
    """The problem with every stage on a rank of its own, which has its limit or none, and all links alike."""
    stages = (
        dataclasses.replace(s, rank=x, nic=-1, limit_bytes=s.limit_bytes if limited else HUGE)
        for x, s in enumerate(problem.stages)
    )
    return dataclasses.replace(problem, stages=tuple(stages), moments=(), pair_ns=None, link_of=None)


def holds_less(problem: Problem) -> bool:
    """Whether stages may hold less in :func:`cheapest` than they do: values that may be computed again."""
    return problem.has_memory and any(n.again_ns >= 0 and n.has_bytes for n in problem.nets)


def all_received(problem: Problem) -> Problem:
    """The problem where nothing that is sent is computed again, and each taker keeps what a stage does."""
    kept = collections.Counter[int]()
    for net in problem.nets:
        kept.update(dict.fromkeys(net.consumers, net.kept_bytes))
    items = (dataclasses.replace(i, saved_bytes=i.saved_bytes + kept[v]) for v, i in enumerate(problem.items))
    nets = (dataclasses.replace(n, again_ns=-1, again_bytes=0, kept_bytes=0) for n in problem.nets)
    return dataclasses.replace(problem, items=tuple(items), nets=tuple(nets))


def needs_more(problem: Problem, other: Problem) -> bool:
    """Whether what does not fit the other problem does not fit this one: it holds the same, and more at once.

    Never where ranks of several stages choose blocks, which they do by their microbatches in flight.
    """
    if list(problem.stages_of.values()) != list(other.stages_of.values()) or _held(problem) != _held(other):
        return False
    if problem.has_blocks or other.has_blocks:
        blocks = ([i.blocks for i in p.items] for p in (problem, other))
        if not other.one_stage_per_rank or (problem.has_blocks and not operator.eq(*blocks)):
            return False
    room = (a.limit_bytes <= b.limit_bytes for a, b in zip(problem.stages, other.stages, strict=True))
    ranks = zip(problem.stages_of, other.stages_of, strict=True)
    return all(room) and all(
        any(
            acting == then and all(n <= m for n, m in zip(fewer, more, strict=True))
            for more, then in _moments(problem, a)
        )
        for a, b in ranks
        for fewer, acting in _moments(other, b)
    )


def _moments(problem: Problem, rank: int) -> Sequence[tuple[tuple[int, ...], int]]:
    """Microbatches alive in each stage of a rank, and which acts; of one stage all that it lets be."""
    own = problem.stages_of[rank]
    return problem.moments_of(rank) if len(own) > 1 else [((problem.stages[own[0]].in_flight,), 0)]


def _held(problem: Problem) -> tuple[object, ...]:
    """All that decides what an assignment holds but limits, blocks, and what is there at once."""
    items = [
        (i.ops, i.static_bytes, i.saved_bytes, i.workspace_bytes, i.first, i.last) for i in problem.items
    ]
    nets = [
        (n.producer, n.consumers, n.n_bytes, n.sent_bytes, n.again_ns < 0, n.again_bytes, n.kept_bytes)
        for n in problem.nets
        if n.has_bytes
    ]
    shares = [(s.items, s.static_bytes, s.saved_bytes, s.workspace_bytes, s.tied) for s in problem.shares]
    settled = problem.recompute, problem.allow_empty, problem.holds_received
    return items, nets, shares, sorted(problem.edges), settled


def _paced(problem: Problem, by_hosts: bool) -> Problem:
    """The problem at the pace of hosts alone, or of devices."""
    return dataclasses.replace(
        problem,
        items=tuple(_at(item, by_hosts) for item in problem.items),
        shares=tuple(_at(share, by_hosts) for share in problem.shares),
    )


def _at(part: Part, by_hosts: bool) -> Part:
    forward_ns, backward_ns = part.host_ns if by_hosts else (part.forward_ns, part.backward_ns)
    return dataclasses.replace(part, forward_ns=forward_ns, backward_ns=backward_ns, host_ns=(0, 0))


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
    return Net(
        net.producer,
        net.consumers,
        receive_ns=least(net.receive_ns),
        value=net.value,
        link_ns=links,
    )
