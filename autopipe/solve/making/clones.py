"""What may be computed again where it is needed rather than sent, and what sending it costs.

Choosing for each stage is left to ``copies``, once items have their stages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ...costs import CostTable
from ...graph import Op, OpGraph
from ...hardware import Link

__all__ = ["clones_of", "copies_of"]


def clones_of(
    graph: OpGraph,
    costs: CostTable,
    sizes: Mapping[str, int],
    link: Link,
    choice: str,
    kept: Collection[str],
    slower: float,
) -> frozenset[str]:
    """The ops to compute again in each stage that needs them, rather than send.

    A movable op is cloned where its forward, with all that must be cloned or sent to feed it, takes no longer
    than receiving its value over ``link``, the cluster's fastest, and so over any. Forwards take so much
    longer on the slowest device, where stages recompute twice that. Numbers made from input shapes always
    are, and what the model returns never is: it has a place of its own.
    ``choice`` ``never`` leaves the rest to be sent, ``always`` clones all that can be; ``kept`` never are.
    """
    takes, barred = graph.takes, _barred(graph) | {*kept}
    price = {op.name: 0.0 for op in graph.inputs}
    again: set[str] = set()
    for op in graph.ops:
        if op.kind in ("input", "output"):
            continue
        ship = link.seconds(sizes[op.name])
        price[op.name] = ship
        if not _may_clone(op) or op.name in barred:
            continue
        own = slower * costs[op.name].paced.forward_s
        redo = own + sum(price[u] for u in set(takes[op.name]))
        is_number = op.is_size and redo == own
        if is_number or choice == "always" or (choice == "auto" and redo <= ship):
            price[op.name] = redo
            again.add(op.name)
    return frozenset(again)


def copies_of(
    graph: OpGraph,
    costs: CostTable,
    sizes: Mapping[str, int],
    link: Link,
    clones: Collection[str],
    kept: Collection[str],
    slower: float,
) -> dict[str, tuple[str, ...]]:
    """By value, the ops that make it again from the model's inputs, where a stage may do that.

    Of the values that are not cloned anyway, those are offered that take no longer to make, on the fastest
    device, than to send and to receive over ``link``, the slowest.
    """
    takes, barred = graph.takes, _barred(graph) | {*kept}
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
        and slower * sum(costs[v].paced.forward_s for v in ops) <= 2 * link.seconds(sizes[name])
    }


def _barred(graph: OpGraph) -> set[str]:
    """What must be where it is: in groups, in order with others, returned by the model."""
    grouped = {name for group in graph.groups for name in group}
    ordered = {name for edge in graph.order_edges for name in edge}
    return grouped | ordered | {a for a, b in graph.edges if graph.by_name[b].kind == "output"}


def _may_clone(op: Op) -> bool:
    exact = not (op.parameters or op.mutated_buffers or op.is_random or op.requires_grad)
    return (op.is_size or op.is_movable) and exact
