"""Merges items that some optimal answer keeps together, so that solvers see fewer of them.

What must stay together for other reasons (groups, pins) is said by the caller; prices stay those of
``problem``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from .pieces import both
from .precedence import in_order
from .problem import HUGE, Item, Net, Problem, Share

__all__ = ["Contraction", "contract", "kept_rows", "merge"]


@dataclasses.dataclass(frozen=True, slots=True)
class Contraction:
    """A smaller problem, and which of its items each item of the original one became part of."""

    problem: Problem
    part_of: tuple[int, ...]

    def expand(self, stage_of: Sequence[int]) -> tuple[int, ...]:
        """An assignment of the smaller problem as one of the original."""
        return tuple(stage_of[p] for p in self.part_of)

    def then(self, other: Contraction) -> Contraction:
        """This contraction followed by one of its smaller problem."""
        return Contraction(other.problem, tuple(other.part_of[p] for p in self.part_of))


def merge(problem: Problem, together: Iterable[Sequence[int]]) -> Contraction:
    """The problem with each of the given sets of items, and every cycle that makes, as one item.

    O(items + edges). The result's items are in a topological order, ties broken by the first member.
    """
    part_of = _number(problem, _components(problem, together))
    members: list[list[int]] = [[] for _ in range(max(part_of, default=-1) + 1)]
    for v, p in enumerate(part_of):
        members[p].append(v)
    edges = sorted({(part_of[a], part_of[b]) for a, b in problem.edges if part_of[a] != part_of[b]})
    items = [_joined(problem, m) for m in members]
    kept, nets = [], []
    for n, net in enumerate(problem.nets):
        consumers = sorted({part_of[v] for v in net.consumers} - {part_of[net.producer]})
        if consumers:
            kept.append(n)
            nets.append(dataclasses.replace(net, producer=part_of[net.producer], consumers=tuple(consumers)))
    shares = [
        dataclasses.replace(s, items=tuple(sorted({part_of[v] for v in s.items}))) for s in problem.shares
    ]
    pairs = problem.pair_ns and kept_rows(problem.pair_ns, kept)
    smaller = dataclasses.replace(
        problem,
        items=tuple(_absorbing(items, shares)),
        edges=tuple(edges),
        nets=tuple(nets if pairs is not None else _merged(nets)),
        shares=tuple(s for s in shares if len(s.items) > 1),
        pair_ns=pairs,
    )
    return Contraction(smaller, part_of)


def kept_rows(
    pairs: Mapping[tuple[int, int], tuple[tuple[int, int], ...]], kept: Sequence[int]
) -> dict[tuple[int, int], tuple[tuple[int, int], ...]]:
    """The prices of some nets by pair of ranks; pairs that share a table go on sharing one."""
    tables = {id(rows): rows for rows in pairs.values()}
    made = {x: tuple(rows[n] for n in kept) for x, rows in tables.items()}
    return {pair: made[id(rows)] for pair, rows in pairs.items()}


def contract(problem: Problem) -> Contraction:
    """The problem without items that lose nothing by joining a neighbour, whatever the other stages are.

    Only where stages may be empty: joining may empty one. See :func:`_joins` for the rule. Repeated until
    nothing changes, about log(items) rounds of O(items²/64 + nets).
    """
    whole = Contraction(problem, tuple(range(len(problem.items))))
    while problem.allow_empty:
        pairs = _joins(whole.problem)
        if not pairs:
            break
        whole = whole.then(merge(whole.problem, pairs))
    return whole


def _joins(problem: Problem) -> list[tuple[int, int]]:
    """Disjoint (item, partner) pairs where moving the item to its partner's stage never costs a stage more.

    The partner's stage gains the item's work, what the item sends elsewhere and takes from elsewhere; it no
    longer pays for values between the two. The item's old stage loses the work, and gains the transfers of
    what it still takes from the item.
    """
    limited = any(s.limit_bytes < HUGE for s in problem.stages)
    buffered = limited and any(net.has_bytes for net in problem.nets)
    if problem.recompute != "never" or buffered or any(net.link_ns for net in problem.nets):
        return []
    above, below = problem.above, problem.below
    made: list[list[Net]] = [[] for _ in problem.items]
    taken: list[list[Net]] = [[] for _ in problem.items]
    for net in problem.nets:
        made[net.producer].append(net)
        for v in net.consumers:
            taken[v].append(net)
    pairs, used = [], set()
    for v, item in enumerate(problem.items):
        held = item.static_bytes or item.saved_bytes or item.workspace_bytes
        pinned = item.first > 0 or item.last >= 0
        if v in used or pinned or problem.shares_of[v] or (limited and held):
            continue
        for u in _partners(problem, v, made[v], taken[v], above, below):
            if u not in used and _is_no_loss(problem, v, u, made[v], taken[v]):
                pairs.append((v, u))
                used |= {v, u}
                break
    return pairs


def _partners(
    problem: Problem,
    v: int,
    made: Sequence[Net],
    taken: Sequence[Net],
    above: Sequence[int],
    below: Sequence[int],
) -> list[int]:
    """The items whose stage ``v`` may always move to: order allows it wherever they are."""
    before, after = problem.before[v], problem.after[v]
    if not before and not after:
        return sorted({*(n.producer for n in taken), *(w for n in made for w in n.consumers)} - {v})
    out = []
    if before:
        last = max(before)
        if all(above[last] >> u & 1 for u in before):
            out.append(last)
    if after:
        first = min(after)
        if all(below[first] >> w & 1 for w in after):
            out.append(first)
    return out


def _is_no_loss(problem: Problem, v: int, u: int, made: Sequence[Net], taken: Sequence[Net]) -> bool:
    here = there = between_here = between_there = 0
    ordered = set(problem.before[v])
    earlier = u in ordered
    for net in made:
        if net.consumers == (u,):
            between_here += net.receive_ns
            between_there += net.send_ns
        else:
            here += net.send_ns
            there += net.receive_ns if earlier or u not in problem.after[v] else _loose(problem, v, net)
    for net in taken:
        if net.producer == u and net.consumers == (v,):
            between_here += net.send_ns
            between_there += net.receive_ns
        elif net.producer != u:
            here += net.receive_ns
            there += 0 if earlier and net.producer in ordered else net.send_ns
    speeds = [s.speed for s in problem.stages]
    work = problem.items[v].work_ns
    if problem.overlap:
        return work == 0 and here <= between_here and there <= between_there
    # of forward and backward together, a stage's rounded work may change by that much more or less
    slack = 3 if work and set(speeds) != {1.0} else 0
    slow, fast = math.ceil(work / min(speeds)) + slack, math.floor(work / max(speeds)) - slack
    return here + slow <= between_here and there <= between_there + max(0, fast)


def _loose(problem: Problem, v: int, net: Net) -> int:
    """What the item's old stage may come to receive when the item moves to a later one: only loose takers."""
    return 0 if set(net.consumers) <= set(problem.after[v]) else net.receive_ns


def _components(problem: Problem, together: Iterable[Sequence[int]]) -> list[int]:
    """Each item's set of items that stay together: those given, and every cycle that they make."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    n = len(problem.items)
    pairs = {*problem.edges}
    for group in together:
        pairs |= {pair for v in group for pair in ((group[0], v), (v, group[0]))}
    if not pairs:
        return list(range(n))
    rows, columns = zip(*pairs, strict=True)
    joined = coo_array((np.ones(len(pairs), dtype=np.int8), (rows, columns)), shape=(n, n)).tocsr()
    out: list[int] = connected_components(joined, directed=True, connection="strong")[1].tolist()
    return out


def _number(problem: Problem, component: Sequence[int]) -> tuple[int, ...]:
    """Components of the merged graph, numbered in a topological order close to the items' own."""
    first: dict[int, int] = {}
    for v, c in enumerate(component):
        first.setdefault(c, v)
    out: list[set[int]] = [set() for _ in first]
    for a, b in problem.edges:
        if component[a] != component[b]:
            out[component[a]].add(component[b])
    order = in_order([sorted(after) for after in out], lambda c, _: (first[c],))
    place = {c: x for x, c in enumerate(order)}
    return tuple(place[c] for c in component)


def _joined(problem: Problem, members: Sequence[int]) -> Item:
    items = [problem.items[v] for v in members]
    if len(items) == 1:
        return items[0]
    lasts = [i.last for i in items if i.last >= 0]
    return Item(
        tuple(op for i in items for op in i.ops),
        sum(i.forward_ns for i in items),
        sum(i.backward_ns for i in items),
        sum(i.static_bytes for i in items),
        sum(i.saved_bytes for i in items),
        max(i.workspace_bytes for i in items),
        max(i.first for i in items),
        min(lasts, default=-1),
        tuple(b for i in items for b in i.blocks),
        functools.reduce(both, (i.host_ns for i in items)),
    )


def _absorbing(items: Sequence[Item], shares: Iterable[Share]) -> list[Item]:
    """The items, with the shares that only one of them uses as part of it."""
    out = list(items)
    for share in shares:
        if len(share.items) > 1:
            continue
        for v in share.items:
            it = out[v]
            out[v] = dataclasses.replace(
                it,
                forward_ns=it.forward_ns + share.forward_ns,
                backward_ns=it.backward_ns + share.backward_ns,
                static_bytes=it.static_bytes + share.static_bytes,
                saved_bytes=it.saved_bytes + share.saved_bytes,
                workspace_bytes=max(it.workspace_bytes, share.workspace_bytes),
                host_ns=both(it.host_ns, share.host_ns),
            )
    return out


def _merged(nets: Iterable[Net]) -> list[Net]:
    """One net for all between the same items, none for what costs nothing."""
    merged: dict[tuple[int, tuple[int, ...], int], Net] = {}
    for n, net in enumerate(nets):
        # a value that may be computed again is chosen for by itself
        key = (net.producer, net.consumers, n if net.again_ns >= 0 else -1)
        old = merged.get(key)
        if old is not None:
            net = dataclasses.replace(
                old,
                send_ns=old.send_ns + net.send_ns,
                receive_ns=old.receive_ns + net.receive_ns,
                link_ns=tuple(
                    (a[0] + b[0], a[1] + b[1]) for a, b in zip(old.link_ns, net.link_ns, strict=True)
                ),
                n_bytes=old.n_bytes + net.n_bytes,
                sent_bytes=old.sent_bytes + net.sent_bytes,
            )
        merged[key] = net
    return [n for n in merged.values() if n.send_ns or n.receive_ns or n.has_bytes]
