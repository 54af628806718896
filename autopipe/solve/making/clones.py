"""What may be computed again where it is needed rather than sent, and what sending it costs.

Choosing for each stage is left to ``copies``, once items have their stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from ...costs import CostTable
from ...graph import Op, OpGraph
from ...hardware import Cluster, Link

__all__ = ["cheapest_link", "clones_of", "copies_of", "slowest_link", "value_bytes"]

_INT_BYTES = 8


def clones_of(graph: OpGraph, costs: CostTable, cluster: Cluster, choice: str = "auto") -> frozenset[str]:
    """The ops to compute again in each stage that needs them, rather than send.

    A movable op is cloned where its forward, with all that must be cloned or sent to feed it, is no dearer
    than receiving its value over the cluster's fastest link, and so over any. Numbers made from input shapes
    always are, and what the model returns never is: it has a place of its own.
    ``choice`` ``never`` leaves the rest to be sent, ``always`` clones all that can be.
    """
    link = cheapest_link(cluster, range(cluster.n_ranks))
    takes, barred = graph_inputs(graph), _barred(graph)
    price = {op.name: 0.0 for op in graph.inputs}
    again: set[str] = set()
    for op in graph.ops:
        if op.kind in ("input", "output"):
            continue
        ship = link.seconds(value_bytes(op, costs))
        price[op.name] = ship
        if not _may_clone(op) or op.name in barred:
            continue
        redo = costs[op.name].forward_s + sum(price[u] for u in set(takes[op.name]))
        is_number = op.is_size and redo == costs[op.name].forward_s
        if is_number or choice == "always" or (choice == "auto" and redo <= ship):
            price[op.name] = redo
            again.add(op.name)
    return frozenset(again)


def copies_of(
    graph: OpGraph, costs: CostTable, cluster: Cluster, clones: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """By value, the ops that make it again from the model's inputs, where a stage may do that.

    Of the values that are not cloned anyway, those are offered that cost no more to make than to send and to
    receive over the slowest link.
    """
    link, barred = slowest_link(cluster), _barred(graph)
    takes = graph_inputs(graph)
    made: dict[str, tuple[str, ...]] = {op.name: () for op in graph.inputs}
    for op in graph.compute:
        free = op.name in clones or (_may_clone(op) and op.name not in barred)
        if free and all(u in made for u in takes[op.name]):
            needs = {v for u in takes[op.name] for v in made[u]} | {op.name}
            made[op.name] = tuple(sorted(needs, key=graph.position.__getitem__))
    return {
        name: ops
        for name, ops in made.items()
        if ops
        and name not in clones
        and sum(costs[v].forward_s for v in ops) <= 2 * link.seconds(value_bytes(graph.by_name[name], costs))
    }


def _barred(graph: OpGraph) -> set[str]:
    """What must be where it is: in groups, in order with others, returned by the model."""
    grouped = {name for group in graph.groups for name in group}
    ordered = {name for edge in graph.order_edges for name in edge}
    return grouped | ordered | {a for a, b in graph.edges if graph.by_name[b].kind == "output"}


def graph_inputs(graph: OpGraph) -> dict[str, list[str]]:
    """By op, the ops whose values it takes."""
    takes: dict[str, list[str]] = {op.name: [] for op in graph.ops}
    for producer, consumer in graph.edges:
        takes[consumer].append(producer)
    return takes


def _may_clone(op: Op) -> bool:
    exact = not (op.parameters or op.mutated_buffers or op.is_random or op.requires_grad)
    return (op.is_size or op.is_movable) and exact


def value_bytes(op: Op, costs: CostTable) -> int:
    """Bytes of an op's value for one microbatch; a number counts as eight."""
    return op.bytes_at(costs.dims) or _INT_BYTES


def slowest_link(cluster: Cluster) -> Link:
    """The link over which a megabyte takes longest."""
    return max(_links(cluster, range(cluster.n_ranks)), key=lambda link: link.seconds(1 << 20))


def cheapest_link(cluster: Cluster, placement: Sequence[int]) -> Link:
    """A link at least as fast as any between the placement's ranks, for prices that bound the true ones."""
    links = _links(cluster, sorted(set(placement)))
    return dataclasses.replace(
        links[0],
        latency_s=min(link.latency_s for link in links),
        bandwidth_bytes_s=max(link.bandwidth_bytes_s for link in links),
    )


def _links(cluster: Cluster, ranks: Sequence[int]) -> list[Link]:
    return [cluster.link(a, b) for a in ranks for b in ranks if a != b] or [cluster.local]
