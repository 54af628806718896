"""What a model's tail costs that runs once on all microbatches together: each microbatch bears its share.

That it is in the last stage is left to ``formulate``, that the schedule waits for it to ``cases``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ...costs import CostTable, OpCost
from ...graph import OpGraph, batch_dim

__all__ = ["tail_words", "with_tail"]


def tail_words(graph: OpGraph, n_microbatches: int) -> str:
    """What a plan says of a model's tail; nothing where it has none, or one microbatch is all."""
    if not graph.last or n_microbatches == 1:
        return ""
    in_order = [graph.by_name[name] for name in sorted(graph.last, key=graph.position.__getitem__)]
    first = next((op for op in in_order if not op.is_size and not op.is_movable), in_order[0])
    where = f" ({first.source})" if first.source else ""
    return (
        f"{first.name}{where} and what follows, {len(graph.last)} ops, mix the rows of a batch: they run "
        "once on all of it, in the last stage, when every microbatch has come so far"
    )


def with_tail(graph: OpGraph, costs: CostTable, n_microbatches: int) -> CostTable:
    """The costs for one of ``n_microbatches``, where the tail takes them all at once.

    Its ops cost in proportion to the bytes they touch, so that one on pairs of rows grows with their square.
    What the tail takes is gathered, and so are its gradients: they count as saved by its first op.
    """
    batch = batch_dim(graph.dims)
    if not graph.tail or n_microbatches == 1 or batch is None or batch.name not in costs.dims:
        return costs
    piece = dict(costs.dims)
    whole = {**piece, batch.name: piece[batch.name] * n_microbatches}
    takes, ops = graph.takes, graph.by_name

    def touched(name: str, dims: Mapping[str, int]) -> int:
        return sum(ops[n].bytes_at(dims) for n in (name, *takes[name]))

    made = dict(costs.costs)
    for name in graph.tail:
        once = n_microbatches * touched(name, piece)
        made[name] = _larger(costs[name], touched(name, whole) / once if once else 1.0, n_microbatches)
    taken = {u for name in graph.tail for u in takes[name]} - {*graph.tail}
    gathered = [ops[u] for u in taken if ops[u].kind != "input"]
    extra = sum(op.bytes_at(piece) * (1 + op.requires_grad) for op in gathered)
    first = min(graph.last, key=graph.position.__getitem__)
    made[first] = dataclasses.replace(made[first], saved_bytes=made[first].saved_bytes + extra)
    return dataclasses.replace(costs, costs=made)


def _larger(cost: OpCost, factor: float, n: int) -> OpCost:
    """Times and saved bytes times ``factor`` for each of ``n`` microbatches, workspace for all at once."""
    return dataclasses.replace(
        cost.scaled(factor),
        saved_bytes=round(cost.saved_bytes * factor),
        workspace_bytes=round(cost.workspace_bytes * factor * n),
        backward_workspace_bytes=round(cost.backward_workspace_bytes * factor * n),
    )
