"""Estimates what ops cost from the kernels they run and a description of the device: no data, no device.

Counting the kernels is left to ``survey`` on the meta device, learning a device's efficiency from
measurements to ``efficiency``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import fx

from .. import accelerator
from ..costs import CostTable, OpCost
from ..errors import InputError
from ..graph import Op, OpGraph, is_matrix
from ..hardware import Device
from ..tracing import preserved
from ..tracing.code.leaves import eager
from .devices import described
from .devices import device as named
from .efficiency import Efficiency, seconds
from .kernel_counts import Kernels
from .meta_attention import FusedAttention
from .replay import Replay
from .standins import stand_ins
from .survey import Account, Survey, saved_values, survey
from .timers import device_name

if TYPE_CHECKING:
    from ..tracing import Capture

__all__ = ["GUESSED", "accounts", "estimate"]

GUESSED = "taken for a matrix product"
"""What the note says that tells of an op which could not run without data."""


def estimate(
    capture: Capture | OpGraph,
    device: Device | str | None = None,
    *,
    dims: Mapping[str, int] | None = None,
    efficiency: Efficiency | None = None,
    autocast: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    training: bool = True,
) -> CostTable:
    """Costs of every op for one microbatch on a described device. Works for models on the meta device.

    ``device`` is a :class:`Device`, or the name or JSON file of one; by default what this machine has.

    FLOPs, bytes, saved bytes and workspace come from running each distinct op, forward and backward, on
    meta tensors; seconds from a roofline (:func:`efficiency.seconds`). ``spread`` is the relative
    half-width of the estimate's interval: two thirds of ops should cost within it.

    ``scaled_dot_product_attention`` counts as the fused kernel that the device has (``Device.attention``).

    A bare :class:`OpGraph` has no code to run; there an op is taken for one matrix product of its input
    with its parameters, and its interval is three times as wide.

    Raises :class:`InputError` for a device of which no rates are known: all ops would be free.
    """
    if not isinstance(device, Device):
        device = named(device) if device else described(device_name(accelerator.current().type))
    if not device.flops_s or not device.bandwidth_bytes_s:
        missing = [name for name in ("flops_s", "bandwidth_bytes_s") if not getattr(device, name)]
        raise InputError(
            f"nothing can be estimated for {device.name!r}, whose {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not known; give the Device its peak rates, or name one "
            "that is described, such as device='H200'"
        )
    efficiency = efficiency or Efficiency()
    graph = capture if isinstance(capture, OpGraph) else capture.ops
    at = {**graph.example_dims, **(dims or {})}
    surveyed, nodes = Survey({}, {}, ()), dict[str, fx.Node]()
    if not isinstance(capture, OpGraph):
        surveyed = accounts(
            capture, dims=at, autocast=autocast, dtype=dtype, training=training, attention=device.attention
        )
        nodes = {n.name: n for n in capture.graphs[training].nodes}
    costs = {}
    for op in graph.compute:
        if op.is_size:
            continue
        known = surveyed.accounts.get(op.name)
        account = _as_product(op, graph, at) if known is None else known
        cost = op_cost(account, device, efficiency, 3.0 if known is None else 1.0)
        inputs = inputs_s(graph, op, cost.backward_s)
        cost = dataclasses.replace(cost, backward_input_s=inputs, backward_weight_s=cost.backward_s - inputs)
        kept = saved_values(nodes[op.name], account) if op.name in nodes else ()
        costs[op.name] = dataclasses.replace(cost, saved_values=kept)
    some = {op.name for op in graph.compute if op.outputs or op.parameters}
    failed = (f"{name}: {why}; {GUESSED}" for name, why in surveyed.failures.items() if name in some)
    return CostTable(
        costs=costs,
        dims=at,
        device=device.name,
        source="estimated",
        optimizer_s_per_byte=efficiency.optimizer_s_per_byte(device),
        versions={"torch": torch.__version__},
        notes=(*failed, *surveyed.notes),
        ops=graph.ops_digest,
    )


def accounts(
    capture: Capture,
    *,
    dims: Mapping[str, int] | None = None,
    autocast: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    training: bool = True,
    attention: str = "",
) -> Survey:
    """The survey of every op at some dims, on the meta device; ops not run have their stand-in's account.

    The model is left as it was: what its layers keep of a run would be tensors without data.
    ``attention`` is whose fused kernels attention counts as (:attr:`Device.attention`).
    """
    replay = Replay(capture, dims=dims, device="meta", dtype=dtype, training=training)
    standing_in = stand_ins(replay, training=training)
    with preserved(capture.model), standing_in, eager(), FusedAttention(attention, autocast) as fused:
        surveyed = survey(replay, autocast)
    every = {
        op.name: surveyed.accounts[op.name]
        for op in capture.ops.compute
        if op.name in surveyed.accounts and replay.ran(op.name) not in surveyed.failures
    }
    notes = surveyed.notes
    if fused.seen:
        notes += (f"attention is assumed to run the {' and '.join(sorted(fused.seen))} kernel",)
    return Survey(every, surveyed.failures, notes)


def op_cost(account: Account, device: Device, efficiency: Efficiency, doubt: float) -> OpCost:
    """The estimated cost of an op from its account, its backward whole; ``doubt`` widens the interval."""
    return OpCost(
        forward_s=seconds(account.forward, device, efficiency),
        backward_s=seconds(account.backward, device, efficiency),
        saved_bytes=account.saved_bytes,
        workspace_bytes=account.workspace_bytes,
        backward_workspace_bytes=account.backward_workspace_bytes,
        flops=account.forward.flops,
        source="estimated",
        spread=efficiency.spread * doubt,
    )


def inputs_s(graph: OpGraph, op: Op, backward_s: float) -> float:
    """The part of an op's backward that its inputs' gradients take, where it is not timed.

    Half where it trains matrices, else all: attention, frozen layers, scales and shifts leave nothing to W.
    None where no input has a gradient.
    """
    if not any(graph.by_name[name].requires_grad for name in graph.takes[op.name]):
        return 0.0
    return backward_s / 2 if trains_matrices(graph, op) else backward_s


def trains_matrices(graph: OpGraph, op: Op) -> bool:
    """Whether an op has weights whose gradients are products, which may wait."""
    trained = (graph.parameter[name] for name in op.parameters)
    return any(p.requires_grad and is_matrix(p.shape) for p in trained)


def _as_product(op: Op, graph: OpGraph, dims: Mapping[str, int]) -> Account:
    """An op as a product of rows with its parameters: 2 FLOPs per parameter and row, twice that backward."""
    weights = [graph.parameter[name] for name in op.parameters if name in graph.parameter]
    rows = max((math.prod(t.shape_at(dims)[:-1]) for t in op.outputs), default=0)
    flops = int(2 * rows * sum(p.numel for p in weights if len(p.shape) > 1))
    n_bytes = 2 * op.bytes_at(dims) + sum(p.bytes for p in weights)
    dtype = op.outputs[0].dtype if op.outputs else ""
    forward = Kernels(1, flops, n_bytes, n_bytes if flops else 0, dtype)
    backward = forward + forward if op.requires_grad else Kernels()
    return Account(forward=forward, backward=backward, saved_bytes=op.bytes_at(dims))
