"""Tables of what a plan is made from: the ops of a graph, and what each costs.

How a table prints is left to ``table``.
"""

from __future__ import annotations

from typing import Any

from ..costs import CostTable, OpCost
from ..graph import Op, OpGraph, TensorSpec
from ..units import n_of
from .generic import dims_text, headline, tables
from .table import Column, Table, count, nbytes, percent, seconds, word

__all__ = ["place", "shape"]


@headline.register
def _(graph: OpGraph) -> str:
    weights = [p for p in graph.parameters if not p.is_buffer]
    size = f"{sum(p.numel for p in weights):,} parameters ({nbytes(sum(p.bytes for p in weights))})"
    dims = ", ".join(f"{d.name}={d.example}" for d in graph.dims)
    tied = sum(len(p.names) > 1 for p in weights)
    parts = [f"{graph.model}: {n_of(len(graph.compute), 'op')}", size]
    parts += [f"{tied} tied"] if tied else []
    return ", ".join([*parts, f"sizes that may change: {dims}"] if dims else parts)


@tables.register
def _(graph: OpGraph) -> tuple[Table, ...]:
    columns = (
        Column("op", "op"),
        Column("kind", "kind"),
        Column("target", "calls"),
        Column("takes", "takes"),
        Column("value", "value"),
        Column("bytes", "size", nbytes),
        Column("n_parameters", "parameters", count),
        Column("notes", "notes"),
        Column("source", "source"),
    )
    dims = graph.example_dims
    rows = tuple(
        (
            op.name,
            op.kind,
            op.target,
            graph.takes[op.name],
            " ".join(map(shape, op.outputs)) or ("size" if op.is_size else ""),
            op.bytes_at(dims),
            sum(graph.parameter[p].numel for p in op.parameters if p in graph.parameter),
            _notes(op),
            place(op.source),
        )
        for op in graph.ops
    )
    return (Table("Ops in program order", columns, rows, f"Sizes at {word(dims_text(dims))}."),)


def place(source: str) -> str:
    """A file and line without the folders of the machine it is on."""
    inside = source.replace("\\", "/").rpartition("site-packages/")[2]
    return "/".join(inside.split("/")[-3:])


def shape(tensor: TensorSpec) -> str:
    """A tensor's type as people write it: ``float32[batch, 128]``."""
    return f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"


def _notes(op: Op) -> tuple[str, ...]:
    flags = ("is_random", "is_tainted", "is_movable")
    notes = [f.removeprefix("is_") for f in flags if getattr(op, f)]
    notes += ["mutates " + ", ".join(op.mutated_buffers)] if op.mutated_buffers else []
    return (*notes, *([f"{op.mode} only"] if op.mode != "both" else []))


@headline.register
def _(costs: CostTable) -> str:
    total = costs.total(costs.costs)
    where = f"{costs.source} on {costs.device}" if costs.device else costs.source
    parts = [f"{n_of(len(costs.costs), 'op')} {where}", f"forward {seconds(total.forward_s)}"]
    parts += [f"backward {seconds(total.backward_s)}", f"saved {nbytes(total.saved_bytes)}"]
    if costs.residual is not None:
        parts.append(f"whole model {costs.residual:+.1%} against their sum")
    return ", ".join([*parts, *([f"at {dims_text(costs.dims)}"] if costs.dims else [])])


@tables.register
def _(costs: CostTable) -> tuple[Table, ...]:
    columns = (
        Column("op", "op"),
        Column("forward_s", "forward", seconds),
        Column("backward_s", "backward", seconds),
        Column("share", "share", percent),
        Column("saved_bytes", "saved", nbytes),
        Column("workspace_bytes", "workspace", nbytes),
        Column("flops", "FLOPs", lambda n: f"{n:.3g}"),
        Column("source", "source"),
        Column("spread", "spread", percent),
    )
    whole = sum(c.seconds for c in costs.costs.values()) or 1.0
    rows = tuple(
        (op, c.forward_s, c.backward_s, c.seconds / whole, *_rest(c)) for op, c in costs.costs.items()
    )
    return (Table("Costs per microbatch", columns, rows),)


def _rest(c: OpCost) -> tuple[Any, ...]:
    return c.saved_bytes, c.workspace_bytes, c.flops, c.source, c.spread
