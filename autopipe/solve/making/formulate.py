"""From an op graph, its costs and a cluster to the integer problem the solvers work on.

Merging what is free is left to ``contract``; solving to ``intervals`` and ``exact``.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...errors import InputError, PlanError
from ...graph import Op
from ...schedule import Schedule
from ..definition.blocks import Block
from ..definition.contract import merge
from ..definition.problem import HUGE, Item, Net, Problem, Share, Stage
from ..definition.relaxed import at_one_pace
from ..proof.filling import windows
from .source import Source, cheapest_link, named_near

__all__ = ["formulate"]


def formulate(source: Source, schedule: Schedule) -> Problem:
    """The problem of cutting a graph into the stages of ``schedule``, placed on the cluster's ranks.

    Every compute op that is not computed again where needed is an item; the model's output is one more, kept
    in the last stage, and so is a tail; one that takes a single microbatch is cut like all else where the ops
    ahead of it are too few for the other stages. Where saved values may be recomputed, an item is a block,
    except under schedules that split the backward: each part would compute it again.

    Raises :class:`PlanError` where pins or groups name nothing or contradict each other.
    """
    maker = _Maker(source, schedule.n_microbatches)
    merged = maker.merged(schedule)
    if maker.tail and schedule.n_microbatches == 1 and largest_cut(merged) < merged.n_stages:
        maker.tail = frozenset()
        merged = maker.merged(schedule)
    if source.settings.recompute != "auto" or schedule.splits_backward:
        return merged
    blocks = maker.blocks(merged)
    items = (dataclasses.replace(i, blocks=b) for i, b in zip(merged.items, blocks, strict=True))
    return dataclasses.replace(merged, items=tuple(items))


def ns(seconds: float) -> int:
    """Whole nanoseconds."""
    return round(seconds * 1e9)


class _Maker:
    """Builds items, nets and shares of one graph; the last stage has its ``tail``."""

    def __init__(self, source: Source, n_microbatches: int) -> None:
        self.source, self.n_microbatches = source, n_microbatches
        self.graph, self.costs, self.cluster = source.graph, source.costs, source.cluster
        self.settings, self.clones, self.copies = source.settings, source.clones, source.copies
        self.tail = self.graph.last
        self.placed = [op for op in self.graph.compute if op.name not in self.clones]
        self.index = {op.name: v for v, op in enumerate(self.placed)}
        self.users = self._users()

    def _users(self) -> dict[str, set[int]]:
        """The items that need each op's value, through clones; the output is the item after the last."""
        users: dict[str, set[int]] = {op.name: set() for op in self.graph.ops}
        consumers = self.graph.consumers
        for op in reversed(self.graph.ops):
            for name in consumers[op.name]:
                if name in self.clones:
                    users[op.name] |= users[name]
                elif name in self.index:
                    users[op.name].add(self.index[name])
                else:
                    users[op.name].add(len(self.placed))
        return users

    def merged(self, schedule: Schedule) -> Problem:
        """The problem, with what must share a stage as one item."""
        problem = self.problem(schedule)
        merged = at_one_pace(merge(problem, self.together(problem)).problem)
        _check_windows(merged)
        return merged

    def problem(self, schedule: Schedule) -> Problem:
        placement = schedule.placement
        k, link = len(placement), cheapest_link(self.cluster)
        items = [self._item(op, k) for op in self.placed] + [Item(first=k - 1)]
        nets = tuple(self._net(op, link) for op in self.placed if self.users[op.name] - {self.index[op.name]})
        edges = {(n.producer, v) for n in nets for v in n.consumers}
        edges |= {
            (self.index[a], self.index[b])
            for a, b in self.graph.order_edges
            if a in self.index and b in self.index
        }
        shares = (*self._parameters(), *self._recomputed())
        link_of = None
        if any(share.link_ns for share in shares):
            place = {link.figures: x for x, link in enumerate(self.cluster.kinds)}
            pairs = itertools.permutations(sorted(set(placement)), 2)
            link_of = {pair: place[self.cluster.link(*pair).figures] for pair in pairs}
        problem = Problem(
            items=tuple(items),
            edges=tuple(sorted(edges)),
            nets=nets,
            shares=shares,
            stages=self._stages(schedule),
            pair_ns=self._pairs(nets, placement),
            sender_pays=self.settings.sender_pays,
            overlap=self.settings.overlap,
            recompute=self.settings.recompute,
            holds_received=self.costs.offloaded and self.settings.training,
            moments=schedule.moments,
            link_of=link_of,
        )
        return self._pinned(problem)

    def _item(self, op: Op, k: int) -> Item:
        c = self.costs[op.name]
        training = self.settings.training
        return Item(
            (op.name,),
            ns(c.forward_s),
            ns(c.backward_s) if training else 0,
            first=k - 1 if op.name in self.tail else 0,
            saved_bytes=c.saved_bytes if training else 0,
            workspace_bytes=max(c.workspace_bytes, c.backward_workspace_bytes if training else 0),
            host_ns=(ns(c.host_forward_s), ns(c.host_backward_s) if training else 0),
        )

    def _price(self, op: Op, link: Any) -> tuple[int, int]:
        """Sending and receiving a value, its gradient included, over one link."""
        seconds = link.seconds(self.source.sizes[op.name])
        if op.requires_grad and self.settings.training:
            seconds *= 2
        return ns(seconds), ns(seconds)

    def _net(self, op: Op, link: Any) -> Net:
        v = self.index[op.name]
        send, receive = self._price(op, link)
        users = tuple(sorted(self.users[op.name] - {v}))
        n_bytes = self.source.sizes[op.name]
        back = op.requires_grad and self.settings.training
        net = Net(v, users, send, receive, op.name, n_bytes, n_bytes if back else 0)
        if op.name not in self.copies:
            return net
        again = [self.costs[name] for name in self.copies[op.name]]
        return dataclasses.replace(
            net,
            again_ns=ns(sum(c.paced.forward_s for c in again)),
            again_bytes=max(c.workspace_bytes for c in again),
            kept_bytes=self.costs[op.name].saved_bytes if self.settings.training else 0,
        )

    def _pairs(
        self, nets: Sequence[Net], placement: Sequence[int]
    ) -> dict[tuple[int, int], tuple[tuple[int, int], ...]] | None:
        if len(self.cluster.kinds) < 2:
            return None
        ranks = sorted(set(placement))
        links = {(a, b): self.cluster.link(a, b) for a in ranks for b in ranks if a != b}
        rates = {pair: link.figures for pair, link in links.items()}
        tables = {
            rate: tuple(self._price(self.graph.by_name[n.value], rate) for n in nets)
            for rate in set(rates.values())
        }
        return {pair: tables[rate] for pair, rate in rates.items()}

    def _parameters(self) -> Iterable[Share]:
        """Every parameter and buffer as a share; one that a single item uses becomes part of it later."""
        kinds = self.cluster.kinds
        for name, ops in self.graph.users.items():
            p, places = self.graph.parameter[name], set[int]()
            for op in ops:
                places.update([self.index[op]] if op in self.index else self.users[op])
            trained = p.requires_grad and self.settings.training
            ratio = 2 + self.settings.optimizer_bytes_per_parameter_byte if trained else 1
            n_ranks = range(2, min(len(places), self.cluster.n_ranks) + 1) if trained else range(0)
            rows = [
                tuple(ns(link.all_reduce_s(p.bytes, n) / self.n_microbatches) for link in kinds)
                for n in n_ranks
            ]
            least = [min(row) for row in rows]
            unlike = any(len(set(row)) > 1 for row in rows)
            yield Share(
                tuple(sorted(places)),
                name,
                static_bytes=round(p.bytes * ratio),
                sync_ns=least[0] if least else 0,
                more_ns=tuple(least[1:]),
                tied=trained,
                link_ns=tuple(rows) if unlike else (),
            )

    def _recomputed(self) -> Iterable[Share]:
        """Cloned ops: every stage that needs one computes it."""
        for name in sorted(self.clones, key=self.graph.position.__getitem__):
            c = self.costs[name]
            if self.users[name]:
                yield Share(
                    tuple(sorted(self.users[name])),
                    name,
                    ns(c.forward_s),
                    saved_bytes=c.saved_bytes if self.settings.training else 0,
                    workspace_bytes=c.workspace_bytes,
                    host_ns=(ns(c.host_forward_s), 0),
                )

    def _stages(self, schedule: Schedule) -> tuple[Stage, ...]:
        out = []
        shared = self._shared_nics(schedule.placement)
        for rank, alive in zip(schedule.placement, schedule.in_flight, strict=True):
            device = self.cluster.devices[rank]
            limits = [device.usable_bytes]
            if self.source.limits:
                limits.append(self.source.limits[rank])
            known = [b for b in limits if b is not None]
            host = self.cluster.host(rank) if shared else 0
            limit = min(known, default=HUGE)
            out.append(Stage(rank, device.speed, limit, alive, host=host, nic=shared.get(rank, -1)))
        return tuple(out)

    def _shared_nics(self, placement: Sequence[int]) -> dict[int, int]:
        """The network interface of each rank with stages that shares it with another such rank."""
        nics = {rank: self.cluster.shared_nics[rank] for rank in {*placement} & {*self.cluster.shared_nics}}
        count = collections.Counter(nics.values())
        return {rank: nic for rank, nic in nics.items() if count[nic] > 1}

    def _pinned(self, problem: Problem) -> Problem:
        items = list(problem.items)
        k = problem.n_stages
        for prefix, stage in self.settings.pin.items():
            if not -k <= stage < k:
                raise InputError(f"pin {prefix!r} names stage {stage}; the plan has stages 0 to {k - 1}")
            for v in self._matching(prefix, "pin"):
                items[v] = dataclasses.replace(items[v], first=stage % k, last=stage % k)
        return dataclasses.replace(problem, items=tuple(items))

    def _matching(self, prefix: str, what: str) -> list[int]:
        return [self.index[op.name] for op in self.source.matching(prefix, what)]

    def blocks(self, problem: Problem) -> list[tuple[Block, ...]]:
        """Each item as a block to compute again in backward, where that gives up bytes and is exact."""
        graph, owner = self.graph, dict[str, str]()
        for op in graph.ops:
            for value in self.costs[op.name].saved_values:
                owner.setdefault(value, op.name)
        takes = graph.takes
        kinds = {op.name: op.kind for op in graph.ops}
        barred = {op.name for op in graph.ops if op.mutated_buffers}
        barred |= {name for g in graph.groups if any(kinds[n] == "input" for n in g) for name in g}
        return [() if barred & {*i.ops} else self._block(i, takes, owner) for i in problem.items]

    def _block(
        self, item: Item, takes: Mapping[str, Sequence[str]], owner: Mapping[str, str]
    ) -> tuple[Block, ...]:
        """What it takes is held in its place, and what it gives where others rely on it to keep that.

        A value that several keep counts at the first of them, as in the ops' saved bytes. The batch is there
        anyway.
        """
        place, own = self.graph.position, set(item.ops)
        first = min((place[op] for op in own), default=0)
        used = {u for op in own for u in takes[op]} - own
        used |= {op for op in own if owner.get(op) in own and not own.issuperset(self.graph.consumers[op])}
        held = [
            self.graph.by_name[value]
            for value in used
            if value not in owner or owner[value] in own or place[owner[value]] > first
        ]
        held_bytes = sum(op.bytes_at(self.costs.dims) for op in held if op.kind != "input" and not op.is_size)
        forward_ns = max(item.forward_ns, item.host_ns[0])
        block = Block(item.ops, forward_ns, item.saved_bytes, held_bytes)
        return (block,) if block.freed_bytes > 0 else ()

    def together(self, problem: Problem) -> list[list[int]]:
        """Sets of items that must share a stage: graph groups, the caller's, uncut values, tied users."""
        sets = [[self.index[name] for name in group if name in self.index] for group in self.graph.groups]
        for group in self.settings.together:
            sets.append([v for prefix in group for v in self._matching(prefix, "together")])
        for value in self.settings.uncut:
            if value not in self.index:
                raise PlanError(
                    f"uncut value {value!r} is no op of the graph that a stage computes; "
                    f"{named_near(self.graph, value)}"
                )
            sets.append([self.index[value], *sorted(self.users[value] - {len(self.placed)})])
        if self.settings.ties == "colocate" and problem.one_stage_per_rank:
            sets += [list(s.items) for s in problem.shares if s.tied]
        return [s for s in sets if len(s) > 1]


def _check_windows(problem: Problem) -> None:
    for item in problem.items:
        if 0 <= item.last < item.first:
            names = ", ".join(item.ops[:3])
            raise PlanError(
                f"pins put ops that must share a stage in different ones: {names} in stages {item.first} and "
                f"{item.last}; drop one of the pins"
            )


def largest_cut(problem: Problem) -> int:
    """The most stages the problem's items can be cut into: one for each that holds an op, and may be earlier
    than the last, and the last."""
    ends = [first == problem.n_stages - 1 for first, _ in windows(problem)]
    held = [is_last for is_last, item in zip(ends, problem.items, strict=True) if item.ops]
    return held.count(False) + any(held)
