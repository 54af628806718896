"""What waits for all microbatches, each of which bears its share of the cost: a model's tail, or a loss.

That a tail is in the last stage is left to ``formulate``, that the schedule waits to ``cases``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ...costs import CostTable, OpCost
from ...graph import OpGraph, batch_dim

__all__ = ["tail_words", "with_outputs_kept", "with_tail"]


def tail_words(graph: OpGraph, n_microbatches: int, loss_on: str = "") -> str:
    """What a plan says of a tail or loss that waits; nothing where none does, or one microbatch is all."""
    if n_microbatches == 1:
        return ""
    if not graph.last:
        told = "the loss takes the outputs of all microbatches at once, once every forward has run"
        return told if loss_on == "batch" else ""
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


def with_outputs_kept(graph: OpGraph, costs: CostTable) -> CostTable:
    """The costs where a loss takes all outputs at once: they are kept, and so are their gradients.

    Not counted: what the loss itself takes, which no graph has.
    """
    ops, made = graph.by_name, dict(costs.costs)
    for op in (ops[name] for name in graph.takes[graph.ops[-1].name]):
        if op.kind != "input" and op.name in made:
            kept = op.bytes_at(costs.dims) * (1 + op.requires_grad)
            made[op.name] = dataclasses.replace(made[op.name], saved_bytes=made[op.name].saved_bytes + kept)
    return dataclasses.replace(costs, costs=made)


def _larger(cost: OpCost, factor: float, n: int) -> OpCost:
    """Times and saved bytes times ``factor`` for each of ``n`` microbatches, workspace for all at once."""
    return dataclasses.replace(
        cost.scaled(factor),
        saved_bytes=round(cost.saved_bytes * factor),
        workspace_bytes=round(cost.workspace_bytes * factor * n),
        backward_workspace_bytes=round(cost.backward_workspace_bytes * factor * n),
    )
