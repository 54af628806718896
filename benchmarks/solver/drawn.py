"""Random problems with everything a problem may have, and small models to be planned as users ask.

What is right to say of them is left to ``fuzz``.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any, TypeVar

from autopipe.costs import CostTable, OpCost
from autopipe.graph import Op, OpGraph, ParameterSpec, TensorSpec
from autopipe.hardware import Cluster, Device, Link
from autopipe.schedule import build, placement
from autopipe.solve import Block, Item, Net, Problem, Share, Stage
from autopipe.solve.definition.problem import HUGE

__all__ = ["PLACED", "Asked", "asked", "planted", "problem"]

Part = TypeVar("Part", Item, Share)

PLACED = (
    ("1f1b", 1, 1),
    ("1f1b", 1, 2),
    ("1f1b", 2, 2),
    ("1f1b", 2, 3),
    ("1f1b", 2, 4),
    ("1f1b", 3, 3),
    ("1f1b", 4, 4),
    ("gpipe", 2, 2),
    ("gpipe", 3, 3),
    ("zb-h1", 3, 3),
    ("zb-h2", 2, 2),
    ("cost-aware", 2, 2),
    ("forward-only", 2, 3),
    ("interleaved", 1, 3),
    ("interleaved", 2, 3),
    ("interleaved", 2, 4),
    ("interleaved", 2, 5),
    ("interleaved", 2, 6),
    ("interleaved", 3, 6),
    ("looped-bfs", 2, 4),
    ("zbv", 2, 3),
    ("zbv", 2, 4),
    ("zbv", 3, 6),
    ("dualpipev", 2, 4),
)
"""Schedules with counts of ranks and stages."""

_MOST = {1: 7, 2: 7, 3: 7, 4: 6, 5: 6, 6: 6}
"""So many items at most, by stages: exhaustive search looks at every assignment of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Sizes:
    """Draws whole numbers, small or so many times as large and uneven: an answer must be right in all."""

    draw: random.Random
    scale: int

    def up_to(self, most: int) -> int:
        value = self.draw.randint(0, most)
        return value * self.scale + (self.draw.randint(0, self.scale // 7) if value and self.scale > 1 else 0)


def problem(draw: random.Random, n_items: int = 0) -> Problem:
    """Items in some order with whatever else a problem may have: few, or so many and in order of need."""
    name, n_ranks, k = draw.choice(PLACED)
    n = n_items or draw.randint(1 if draw.random() < 0.1 else k, _MOST[k])
    ns = _Sizes(draw, draw.choice((1, 1, 1, 1, 10**6 + 3, 10**9 + 7)))
    size = _Sizes(draw, draw.choice((1, 1, 1, 10**6 + 3)))
    placed = placement(name, n_ranks, k)
    if draw.random() < 0.15:
        order = draw.sample(range(n_ranks), n_ranks)
        placed = tuple(order[rank] for rank in placed)
    schedule = build(name, n_ranks, k, draw.randint(1, 6), placement=placed)
    items, nets = _shaped(draw, n, ns, size)
    edges = {(net.producer, c) for net in nets for c in net.consumers}
    edges |= {(u, v) for u, v in _pairs(draw, n) if u < v}
    nets += [_loose(draw, n, ns, size) for _ in range(draw.choice((0, 0, 0, 0, 1, 2))) if n > 1]
    if not n_items and draw.random() < 0.05:
        edges |= {(v, u) for u, v in _pairs(draw, n)}
    shares = [_share(draw, n, ns, size) for _ in range(draw.choice((0, 0, 1, 2))) if n > 1]
    if draw.random() < 0.15:
        items, shares = _launched(draw, items, ns), _launched(draw, shares, ns)
    made = Problem(
        tuple(_pinned(draw, items, k)),
        tuple(sorted(edges)),
        tuple(nets),
        tuple(shares),
        _stages(draw, schedule.placement, schedule.in_flight, size.scale),
        _priced(draw, nets, n_ranks, ns) if draw.random() < 0.3 else None,
        draw.choice(("once", "once", "once", "receiver")),
        draw.random() < 0.7,
        draw.choice(("never", "auto", "auto", "always")) if min(schedule.in_flight) else "never",
        allow_empty=draw.random() < 0.12,
        holds_received=draw.random() < 0.1,
        moments=schedule.moments,
    )
    made = _unlike(draw, made, ns)
    return made if n_items or draw.random() < 0.85 else _shuffled(draw, made)


def _unlike(draw: random.Random, made: Problem, ns: _Sizes) -> Problem:
    """The same where what is summed takes longer over some of the links."""
    ranks = sorted({stage.rank for stage in made.stages})
    if len(ranks) < 2 or not any(s.sync_ns for s in made.shares) or draw.random() < 0.6:
        return made
    longer = 0, ns.up_to(8), ns.up_to(20)
    shares = tuple(
        dataclasses.replace(s, link_ns=tuple(tuple(n + x for x in longer) for n in (s.sync_ns, *s.more_ns)))
        if s.sync_ns
        else s
        for s in made.shares
    )
    link_of = {pair: draw.randrange(3) for pair in itertools.permutations(ranks, 2)}
    return dataclasses.replace(made, shares=shares, link_of=link_of)


def planted(draw: random.Random) -> tuple[Problem, tuple[int, ...]]:
    """Ten to forty items, and an assignment that leaves some ranks hardly a byte and meets some pins."""
    made = problem(draw, draw.randint(10, 40))
    k, n = made.n_stages, len(made.items)
    cuts = sorted(draw.sample(range(1, n - 1), k - 1))
    stage_of = tuple(sum(v >= cut for cut in cuts) for v in range(n))
    items = [dataclasses.replace(i, first=0, last=-1) for i in made.items]
    for v in draw.sample(range(n), draw.choice((0, 0, 1, 3))):
        items[v] = dataclasses.replace(items[v], first=stage_of[v], last=stage_of[v])
    stages = tuple(dataclasses.replace(s, limit_bytes=HUGE) for s in made.stages)
    made = dataclasses.replace(made, items=tuple(items), stages=stages)
    loads = made.loads(stage_of)
    held = {r: made.rank_bytes(r, [loads[s] for s in own]) for r, own in made.stages_of.items()}
    more, evenly = draw.choice((0, 1, 1.1)), draw.random() < 0.7
    limits = {
        r: round(more * (max(held.values()) if evenly else n_bytes)) or HUGE for r, n_bytes in held.items()
    }
    stages = tuple(dataclasses.replace(s, limit_bytes=limits[s.rank]) for s in stages)
    return dataclasses.replace(made, stages=stages), stage_of


def _pairs(draw: random.Random, n: int) -> list[tuple[int, int]]:
    """Now and then one or two pairs of items."""
    if n < 2 or draw.random() < 0.8:
        return []
    return [(min(pair), max(pair)) for pair in (draw.sample(range(n), 2) for _ in range(draw.randint(1, 2)))]


def _shaped(draw: random.Random, n: int, ns: _Sizes, size: _Sizes) -> tuple[list[Item], list[Net]]:
    """Items and the values along their order: anything, a line of mostly alike ones, or a cross attention."""
    items = [_item(draw, v, ns, size) for v in range(n)]
    shape = draw.choice(("any", "any", "any", "line", "cross"))
    if shape == "line" and n > 1:
        net = _net(draw, 0, range(1, 2), ns, size)
        for v in draw.sample(range(n), draw.randint(0, n)):
            blocks = tuple(dataclasses.replace(b, ops=items[v].ops) for b in items[0].blocks)
            items[v] = dataclasses.replace(items[0], ops=items[v].ops, blocks=blocks)
        return items, [dataclasses.replace(net, producer=v, consumers=(v + 1,)) for v in range(n - 1)]
    if shape == "cross" and n > 4:
        m = (n - 1) // 2
        free, key = _item(draw, 1, ns, size), _net(draw, 1, range(2, 3), ns, size)
        free = dataclasses.replace(free, static_bytes=0, saved_bytes=0, workspace_bytes=0, blocks=())
        items[1 : m + 1] = [dataclasses.replace(free, ops=(f"o{v}",)) for v in range(1, m + 1)]
        nets = [dataclasses.replace(_net(draw, 0, range(1, 2), ns, size), consumers=(*range(1, m + 1),))]
        nets += [dataclasses.replace(key, producer=v, consumers=(m + v,)) for v in range(1, m + 1)]
        return items, nets + [_net(draw, v, range(v + 1, v + 2), ns, size) for v in range(m + 1, n - 1)]
    makers = [v for v in range(n - 1) for _ in range(draw.choice((0, *[1] * 8, 2)))]
    nets = [_net(draw, v, range(v + 1, n), ns, size) for v in makers]
    if n > 1 and draw.random() < 0.3:
        items[-1] = Item()
    return items, nets


def _item(draw: random.Random, v: int, ns: _Sizes, size: _Sizes) -> Item:
    most = draw.choice((6, 6, 40))
    saved = size.up_to(6)
    item = Item((f"o{v}",), ns.up_to(most), ns.up_to(most), size.up_to(6), saved, size.up_to(4))
    if saved and draw.random() < 0.5:
        item = dataclasses.replace(
            item, blocks=(Block(item.ops, item.forward_ns, saved, draw.randrange(saved)),)
        )
    return item


def _net(draw: random.Random, v: int, later: range, ns: _Sizes, size: _Sizes) -> Net:
    takers = sorted(draw.sample(later, min(len(later), draw.choice((1, 1, 1, 2, 3)))))
    price, n_bytes = draw.choice((3, 6, 20)), size.up_to(4)
    again = draw.choice((-1, -1, -1, 0, 2, 5))
    again = again if again < 0 else ns.up_to(again)
    sent = draw.choice((0, n_bytes))
    beside = (size.up_to(3), size.up_to(3)) if again >= 0 else (0, 0)
    return Net(v, tuple(takers), ns.up_to(price), ns.up_to(price), f"v{v}", n_bytes, sent, again, *beside)


def _loose(draw: random.Random, n: int, ns: _Sizes, size: _Sizes) -> Net:
    """A value that no edge orders: gradients may flow to items that come before."""
    maker, *takers = draw.sample(range(n), draw.randint(2, min(n, 4)))
    net = _net(draw, maker, range(n), ns, size)
    net = dataclasses.replace(net, consumers=tuple(sorted(takers)), again_ns=-1)
    return dataclasses.replace(net, again_bytes=0, kept_bytes=0)


def _share(draw: random.Random, n: int, ns: _Sizes, size: _Sizes) -> Share:
    held = tuple(sorted(draw.sample(range(n), min(n, draw.choice((2, 2, 3))))))
    if draw.random() < 0.3:
        work = ns.up_to(6), ns.up_to(draw.choice((0, 4)))
        return Share(held, "clone", *work, 0, size.up_to(3), size.up_to(draw.choice((0, 3))))
    sync = ns.up_to(8)
    steps = (ns.up_to(4) for _ in range(draw.choice((0, 1, 2))))
    more = tuple(itertools.accumulate(steps, initial=sync))[1:]
    return Share(held, "w", static_bytes=size.up_to(6), sync_ns=sync, more_ns=more, tied=draw.random() < 0.9)


def _launched(draw: random.Random, parts: Sequence[Part], ns: _Sizes) -> list[Part]:
    """Most of the parts with what a host takes to launch them; a block runs again at the slower's pace."""
    out = []
    for part in parts:
        if draw.random() < 0.8:
            host_ns = ns.up_to(12), ns.up_to(12)
            part = dataclasses.replace(part, host_ns=host_ns)
            if isinstance(part, Item):
                again = (
                    dataclasses.replace(b, forward_ns=max(b.forward_ns, host_ns[0])) for b in part.blocks
                )
                part = dataclasses.replace(part, blocks=tuple(again))
        out.append(part)
    return out


def _pinned(draw: random.Random, items: Sequence[Item], k: int) -> list[Item]:
    """Items with the stages they may be in: some in one alone or in a few, what has no op in the last."""
    out = list(items)
    for _ in range(draw.choice((0, 0, 0, 1, 2))):
        v, first = draw.randrange(len(out)), draw.randrange(k)
        last = first if draw.random() < 0.7 else draw.randint(first, k - 1)
        out[v] = dataclasses.replace(out[v], first=first, last=last)
    return [i if i.ops else dataclasses.replace(i, first=k - 1, last=-1) for i in out]


def _stages(
    draw: random.Random, placed: Sequence[int], in_flight: Sequence[int], scale: int
) -> tuple[Stage, ...]:
    ranks = range(max(placed) + 1)
    speeds = [draw.choice((1.0, 1.0, 1.0, 1.0, 2.0, 0.7, 0.3)) for _ in ranks]
    if draw.random() < 0.5:
        speeds = [1.0 for _ in ranks]
    limits = [draw.choice((HUGE, 20, 40, 60, 90)) for _ in ranks]
    if draw.random() < 0.7:
        limits = [draw.choice((HUGE, HUGE, HUGE, 25, 40, 60))] * len(ranks)
    hosts = [draw.randint(0, 1) for _ in ranks] if draw.random() < 0.4 else [0 for _ in ranks]
    shared = [hosts.count(h) > 1 and len({*hosts}) > 1 and draw.random() < 0.8 for h in hosts]
    nics = [h if share and shared.count(True) > 1 else -1 for h, share in zip(hosts, shared, strict=True)]
    return tuple(
        Stage(r, speeds[r], min(HUGE, limits[r] * scale), n, host=hosts[r], nic=nics[r])
        for r, n in zip(placed, in_flight, strict=True)
    )


def _priced(
    draw: random.Random, nets: Sequence[Net], n_ranks: int, ns: _Sizes
) -> dict[tuple[int, int], tuple[tuple[int, int], ...]]:
    """What each value costs from rank to rank: by pair, or one of two tables."""
    pairs = list(itertools.permutations(range(n_ranks), 2))
    n_tables = 2 if draw.random() < 0.5 else len(pairs)
    tables = [
        tuple((m.send_ns + ns.up_to(4), m.receive_ns + ns.up_to(4)) for m in nets) for _ in range(n_tables)
    ]
    return {pair: tables[x] if n_tables > 2 else draw.choice(tables) for x, pair in enumerate(pairs)}


def _shuffled(draw: random.Random, made: Problem) -> Problem:
    """The same with its items in any order."""
    place = draw.sample(range(len(made.items)), len(made.items))
    items = [made.items[v] for v in sorted(range(len(place)), key=place.__getitem__)]
    moved = [
        dataclasses.replace(
            n, producer=place[n.producer], consumers=tuple(sorted(place[v] for v in n.consumers))
        )
        for n in made.nets
    ]
    shares = (dataclasses.replace(s, items=tuple(sorted(place[v] for v in s.items))) for s in made.shares)
    return dataclasses.replace(
        made,
        items=tuple(items),
        edges=tuple(sorted((place[a], place[b]) for a, b in made.edges)),
        nets=tuple(moved),
        shares=tuple(shares),
    )


@dataclasses.dataclass(frozen=True)
class Asked:
    """A graph of a few ops, what they cost, where they run, and what is asked of ``solve``."""

    graph: OpGraph
    costs: CostTable
    cluster: Cluster
    options: dict[str, Any]


def asked(draw: random.Random) -> Asked:
    """A small model with masks, sizes, ties, buffers, random draws and groups, and settings of all kinds."""
    name, n_ranks, n_stages = draw.choice([row for row in PLACED if row[2] <= 5])
    n = draw.randint(n_stages, 5)
    graph = _graph(draw, n)
    costs = {op.name: _cost(draw, op) for op in graph.compute}
    if draw.random() < 0.2:
        costs = {name: _queued(draw, cost) for name, cost in costs.items()}
    table = CostTable(costs, offloaded=draw.random() < 0.1)
    options: dict[str, Any] = {
        "n_stages": n_stages,
        "n_microbatches": draw.choice((1, 2, 4, 6)),
        "schedule": name,
    }
    if draw.random() < 0.12:
        options |= {"n_stages": "auto"}
    if draw.random() < 0.12:
        options |= {"schedule": "auto"}
    if draw.random() < 0.5:
        options["memory_limit"] = draw.choice((300_000, 500_000, 800_000, 1_500_000))
    names = [op.name for op in graph.compute]
    if draw.random() < 0.2:
        options["pin"] = {draw.choice(names): draw.randrange(-n_stages, n_stages)}
    if draw.random() < 0.1 and len(names) > 1:
        options["together"] = [draw.sample(names, 2)]
    if draw.random() < 0.1:
        options["uncut"] = [draw.choice(names)]
    for option, share, values in (
        ("recompute", 0.4, ("auto", "auto", "always")),
        ("overlap", 0.2, (False,)),
        ("ties", 0.15, ("sync", "colocate")),
        ("clone", 0.15, ("never", "always")),
        ("sender_pays", 0.15, ("receiver",)),
        ("device_order", 0.15, ("given", "auto")),
        ("optimizer_bytes_per_parameter_byte", 0.15, (0.0, 6.5)),
    ):
        if draw.random() < share:
            options[option] = draw.choice(values)
    return Asked(graph, table, _cluster(draw, n_ranks), options)


def _graph(draw: random.Random, n: int) -> OpGraph:
    wide = TensorSpec((draw.choice((8, 64, 4096)), 64), "float32", True)
    weights = [ParameterSpec(f"w{v}", (f"w{v}",), (draw.choice((16, 256)), 64), "float32") for v in range(n)]
    weights[0] = dataclasses.replace(weights[0], requires_grad=draw.random() < 0.9)
    counter = ParameterSpec("n", ("n",), (64,), "float32", requires_grad=False, is_buffer=True)
    tied = n > 2 and draw.random() < 0.4
    ops = [Op("x", "input", "x", outputs=(TensorSpec((8, 64), "float32"),))]
    glue = []
    if draw.random() < 0.4:
        ops.append(Op("size", "method", "size", is_size=True))
        glue.append(("x", "size"))
    if draw.random() < 0.4:
        made = TensorSpec((draw.choice((8, 64, 512)), 64), "float32")
        ops.append(Op("mask", "function", "torch.tril", outputs=(made,), is_movable=True))
        glue.append((ops[-2].name, "mask"))
    free = [op.name for op in ops[1:]]
    edges, drawn_at = list(glue), []
    for v in range(n):
        held = "w0" if tied and v == n - 1 else f"w{v}"
        counts = ("n",) if draw.random() < 0.1 else ()
        if draw.random() < 0.15:
            drawn_at.append(f"o{v}")
        out = wide if draw.random() < 0.9 else dataclasses.replace(wide, requires_grad=False)
        ops.append(
            Op(
                f"o{v}",
                "module",
                f"m.o{v}",
                f"m.o{v}",
                outputs=(out,),
                parameters=(held,),
                buffers=counts,
                mutated_buffers=counts,
                is_random=f"o{v}" in drawn_at,
            )
        )
        takes = {f"o{u}" for u in range(v) if (u == v - 1 and draw.random() < 0.8) or draw.random() < 0.2}
        takes |= {name for name in free if draw.random() < 0.6}
        edges += [(u, f"o{v}") for u in sorted(takes) or ["x"]]
    ops.append(Op("output", "output", "output"))
    used = {a for a, _ in edges}
    edges += [(op.name, "output") for op in ops[1:-1] if op.name not in used]
    place = {op.name: i for i, op in enumerate(ops)}
    edges.sort(key=lambda e: (place[e[0]], place[e[1]]))
    counting = tuple(op.name for op in ops if op.buffers)
    alias = tuple(sorted(draw.sample([f"o{v}" for v in range(n)], 2))) if n > 1 else ()
    groups = [counting] * (len(counting) > 1) + [alias] * (len(alias) > 1 and draw.random() < 0.1)
    return OpGraph(
        "Small",
        tuple(ops),
        tuple(edges),
        order_edges=tuple(itertools.pairwise(drawn_at)),
        groups=tuple(groups),
        parameters=(*weights, counter),
    )


def _cost(draw: random.Random, op: Op) -> OpCost:
    if op.is_size:
        return OpCost()
    if op.is_movable:
        made_s, workspace = draw.choice((1e-7, 1e-5, 1e-4, 1e-3)), draw.choice((0, 20_000))
        return OpCost(made_s, saved_bytes=draw.choice((0, 30_000)), workspace_bytes=workspace)
    forward = draw.choice((1e-5, 1e-4, 1e-3)) * draw.randint(1, 9)
    saved = draw.choice((0, 10_000, 60_000))
    return OpCost(forward, 2 * forward, forward, forward, saved, draw.choice((0, 20_000)))


def _queued(draw: random.Random, cost: OpCost) -> OpCost:
    """The cost on a device that works on while its host launches more: that may take longer."""
    host = draw.choice((0.0, 0.3, 2.0, 5.0))
    return dataclasses.replace(
        cost,
        host_forward_s=host * cost.forward_s,
        host_backward_s=draw.choice((0.3, 1.0)) * host * cost.backward_s,
    )


def _cluster(draw: random.Random, n_ranks: int) -> Cluster:
    hosts = tuple(draw.randint(0, 1) for _ in range(n_ranks)) if draw.random() < 0.5 else ()
    devices = tuple(
        Device(
            memory_bytes=draw.choice((None, None, None, 900_000)),
            speed=draw.choice((1.0, 1.0, 1.0, 0.5)),
            reserved_bytes=draw.choice((0, 0, 100_000)),
        )
        for _ in range(n_ranks)
    )
    links = {}
    if n_ranks > 1 and draw.random() < 0.2:
        a, b = draw.sample(range(n_ranks), 2)
        links[a, b] = Link(draw.choice((0.0, 1e-3)), draw.choice((1e7, 1e10)))
    nics = tuple(draw.randint(0, 1) for _ in hosts) if draw.random() < 0.5 else ()
    if draw.random() < 0.1:
        devices = tuple(dataclasses.replace(d, speed=3 * d.speed) for d in devices)
    return Cluster(devices, hosts, Link(1e-5, 1e9), Link(1e-4, 1e8), links, nics)
