"""Which ops of a microbatch need not run, since like ones that do stand for them.

Running the others is left to ``replay``.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ..graph import Op, OpGraph

__all__ = ["INSTANCES", "MOST_INSTANCES", "OUT_OF_CACHE", "stood_for"]

INSTANCES = 4
"""How many ops of one signature are run at least; later ones take the value of the last that ran."""
MOST_INSTANCES = 32
OUT_OF_CACHE = 1 << 25
"""Bytes from which caches that ranks share hold little of what a pass has run: until then all ops are run.

Of fewer, weights would be found in a cache that a model's own, all of them, have long fallen out of.
"""


def stood_for(graph: fx.Graph, ops: OpGraph, dims: Mapping[str, int], *, runs: bool) -> dict[str, str]:
    """Ops that are left out at ``dims`` → the earlier op whose value stands in for theirs.

    Where nothing ``runs`` that could be found in a cache, as few are kept as possible.
    """
    seen: dict[tuple[object, ...], list[str]] = {}
    out: dict[str, str] = {}
    touched = 0 if runs else OUT_OF_CACHE
    bound = {name for group in ops.groups for name in group if len(group) > 1}
    for node in graph.nodes:
        op = ops.by_name.get(node.name)
        if op is None:
            continue
        if _may_be_left_out(node, op, bound):
            alike = seen.setdefault((op.signature, _shapes(op, dims)), [])
            if len(alike) >= (INSTANCES if touched >= OUT_OF_CACHE else MOST_INSTANCES):
                out[node.name] = alike[-1]
                continue
            alike.append(node.name)
        touched += _touched_bytes(op, ops, dims)
    return out


def _touched_bytes(op: Op, ops: OpGraph, dims: Mapping[str, int]) -> int:
    """Of an op's value and of its weights; twice where there is a gradient as well."""
    specs = (ops.parameter[name] for name in (*op.parameters, *op.buffers))
    weights = sum(p.bytes * (2 if p.requires_grad and not p.is_buffer else 1) for p in specs)
    return weights + op.bytes_at(dims) * (2 if op.requires_grad else 1)


def _may_be_left_out(node: fx.Node, op: Op, bound: set[str]) -> bool:
    """Whether another value of the same shape may take this one's place: floats, which index nothing."""
    if not node.op.startswith("call") or not op.signature or op.is_size or not op.outputs:
        return False
    if op.kind != "module" and op.name in bound:
        return False
    return all(t.dtype.startswith(("float", "bfloat", "complex")) for t in op.outputs)


def _shapes(op: Op, dims: Mapping[str, int]) -> tuple[tuple[float, ...], ...]:
    return tuple(t.shape_at(dims) for t in op.outputs)
