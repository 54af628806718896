"""How tensors lie in memory: pieces of a batch, and batches of pieces, keep the order of their axes.

Code may ask how a tensor lies or view it, and kernels differ by it. Which axis rows lie along is left to
callers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["concatenated", "lying_like"]


def lying_like(value: Tensor, piece: Tensor) -> Tensor:
    """A piece of a batch, as dense as the batch and in its order."""
    order = _order(value)
    laid = piece.permute(order)
    if laid.is_contiguous() or not value.permute(order).is_contiguous():
        return piece
    return laid.contiguous().permute(_inverse(order))


def concatenated(pieces: Sequence[Tensor], axis: int) -> Tensor:
    """The batch of pieces ``[..., rows, ...]`` along ``axis``, in the order of the first if it is dense."""
    order = _order(pieces[0])
    if pieces[0].is_contiguous() or not pieces[0].permute(order).is_contiguous():
        return torch.cat(list(pieces), axis)
    laid = torch.cat([piece.permute(order).contiguous() for piece in pieces], order.index(axis))
    return laid.permute(_inverse(order))


def _order(tensor: Tensor) -> list[int]:
    """The axes, outermost in memory first."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]
