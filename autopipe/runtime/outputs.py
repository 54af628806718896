"""The model's outputs and loss for the full batch, from those of its microbatches, on every rank that asks.

Rebuilding the model's own output structure is left to ``tracing``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .boundary import flatten
from .peers import Peers

__all__ = ["join", "share", "weighted"]


def join(parts: Sequence[Sequence[Any]], rows: Sequence[int], weights: Sequence[float]) -> list[Any]:
    """Flat output leaves of the full batch from those of each microbatch.

    A tensor that leads with the microbatch's rows is concatenated, a scalar averaged by ``weights``; the
    rest is taken from the first microbatch.
    """
    if len(parts) == 1:
        return list(parts[0])
    return [_join_leaf(leaf, rows, weights) for leaf in zip(*parts, strict=True)]


def _join_leaf(leaf: Sequence[Any], rows: Sequence[int], weights: Sequence[float]) -> Any:
    if not all(isinstance(x, Tensor) for x in leaf):
        return leaf[0]
    if leaf[0].ndim == 0 and leaf[0].is_floating_point():
        return weighted(leaf, weights).to(leaf[0].dtype)
    if all(x.ndim and x.shape[0] == n for x, n in zip(leaf, rows, strict=True)):
        return torch.cat(list(leaf))
    return leaf[0]


def weighted(losses: Sequence[Tensor | None], weights: Sequence[float]) -> Tensor:
    """Σ weight × loss in fp64; a microbatch of weight 0 adds nothing, though its mean of nothing is NaN."""
    terms = [(loss, w) for loss, w in zip(losses, weights, strict=True) if w and loss is not None]
    stacked = torch.stack([loss for loss, _ in terms]).double()
    return stacked @ torch.tensor([w for _, w in terms], dtype=torch.float64, device=stacked.device)


def share(leaves: list[Any] | None, peers: Peers, source: int, device: torch.device) -> list[Any]:
    """Flat output leaves of pipeline rank ``source``, on every rank."""
    tensors, frame = flatten(leaves or [])
    specs = [(t.shape, t.dtype) for t in tensors]
    specs, frame = peers.share((specs, frame), source)
    if peers.rank != source:
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in specs]
    tensors = [peers.broadcast(t.contiguous(), source) for t in tensors]
    return tensors if frame is None else frame.fill(tensors)
