"""Brings every rank's weights to every rank, so that the user's model is whole again.

Weights in files are left to ``save_load``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...graph import ParameterSpec
from ...stages import Stage
from ...tracing.members import registered
from ..checkpoint.rank_contents import whole
from ..stage.setup import exchange
from ..wire.peers import Peers
from ..wire.plain_values import dtype_of, name_of
from .stale import unmark

if TYPE_CHECKING:
    from ...tracing import Capture

__all__ = ["gather_weights"]


@torch.no_grad()
def gather_weights(capture: Capture, stages: Sequence[Stage], peers: Peers, device: torch.device) -> None:
    """Give the model of every rank each parameter and buffer as the rank that holds it has it now.

    Weights that were released, or never were on this rank, come to the CPU. Sharded parameters are replaced
    by whole ones, after which their stage no longer trains.
    """
    own: dict[str, Tensor] = {}
    owners: list[tuple[ParameterSpec, int]] = []
    for spec, stage, tensor in _held(capture, stages):
        owners.append((spec, stage.rank))
        if stage.rank == peers.rank:
            own[spec.name] = whole(tensor)
    mine = {name: (tuple(t.shape), name_of(t.dtype)) for name, t in own.items()}
    shapes = peers.gather(mine, dict[str, tuple[tuple[int, ...], str]])
    for spec, rank in owners:
        shape, dtype = shapes[rank][spec.name]
        here = own.get(spec.name)
        value = torch.empty(shape, dtype=dtype_of(dtype), device=device) if here is None else here.to(device)
        held = [_at(capture.model, name) for name in spec.names]
        unmark(held)
        _put(held, peers.broadcast(value, rank), (capture.model, *stages))


def _held(capture: Capture, stages: Sequence[Stage]) -> Iterator[tuple[ParameterSpec, Stage, Tensor]]:
    """Every parameter and buffer of the model once, with the stage of the lowest rank that holds it."""
    seen: set[str] = set()
    for stage in sorted(stages, key=lambda s: s.rank):
        named = [*stage.named_parameters(remove_duplicate=False)]
        for name, tensor in [*named, *stage.named_buffers(remove_duplicate=False)]:
            spec = capture.ops.parameter.get(name)
            if spec is not None and spec.name not in seen:
                seen.add(spec.name)
                yield spec, stage, tensor


def _put(held: Sequence[Tensor], value: Tensor, roots: Sequence[nn.Module]) -> None:
    """Write ``value`` into the one tensor held, or, where that cannot take it, put it in the place of all."""
    there = held[0]
    if there.is_meta or hasattr(there, "to_local") or any(other is not there for other in held):
        whole = value.cpu()
        if isinstance(there, nn.Parameter):
            whole = nn.Parameter(whole, there.requires_grad)
        exchange(roots, {id(tensor): whole for tensor in held})
    elif there.shape != value.shape:
        there.data = value.cpu()
    else:
        there.copy_(value)


def _at(model: nn.Module, name: str) -> Tensor:
    found: Tensor = registered(model, name)
    return found
