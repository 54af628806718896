"""How tensors lie in memory: pieces of a batch, and batches of pieces, keep the order of their axes.

Code may ask how a tensor lies or view it, and kernels differ by it. Which axis rows lie along is left to
callers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["concatenated", "copied", "lying_as", "lying_like", "of_blocks"]


def lying_like(value: Tensor, piece: Tensor) -> Tensor:
    """A piece of a batch, as dense as the batch and in its order.

    One row keeps the gaps that it has in the batch, where without them it would be contiguous as that is not.
    """
    order = _order(value)
    laid = piece.permute(order)
    if laid.is_contiguous() or not value.permute(order).is_contiguous():
        return piece
    dense = laid.contiguous().permute(_inverse(order))
    return piece if dense.is_contiguous() and not value.is_contiguous() else dense


def concatenated(pieces: Sequence[Tensor], axis: int) -> Tensor:
    """The batch of pieces ``[..., rows, ...]`` along ``axis``, in the order of the first if it is dense."""
    order = _order(pieces[0])
    if pieces[0].is_contiguous() or not pieces[0].permute(order).is_contiguous():
        return torch.cat(list(pieces), axis)
    laid = torch.cat([piece.permute(order).contiguous() for piece in pieces], order.index(axis))
    return laid.permute(_inverse(order))


def of_blocks(pieces: Sequence[Tensor], axis: int, rows: Sequence[int]) -> Tensor:
    """The batch of pieces that have, along an axis, a place for each row, then another for each."""
    each = [t.unflatten(axis, (-1, n)) for t, n in zip(pieces, rows, strict=True)]
    return torch.cat(each, axis + 1).flatten(axis, axis + 1)


def copied(tensor: Tensor) -> Tensor:
    """A copy that lies in memory as the tensor does: with its gaps, and with elements that share a place."""
    return lying_as(tensor.detach().clone(), tensor)


def lying_as(value: Tensor, tensor: Tensor) -> Tensor:
    """What was made of rows of a tensor, in its order, with its gaps and with what it expands."""
    is_plain = type(tensor) is Tensor and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    if not is_plain or tensor.layout is not torch.strided or not (tensor.numel() and value.numel()):
        return value
    steps = _steps(value.shape, tensor)
    if all(a == b or n == 1 for a, b, n in zip(steps, value.stride(), value.shape, strict=True)):
        return value
    held = value
    for axis, step in enumerate(steps):
        held = held if step else held.narrow(axis, 0, 1)  # all along it are one
    new = torch.empty_strided(held.shape, [s or 1 for s in steps], dtype=value.dtype, device=value.device)
    return new.copy_(held).expand(value.shape)


def _steps(shape: Sequence[int], tensor: Tensor) -> list[int]:
    """The strides of a tensor of this shape that lies as another one does."""
    steps, extent, was = [0] * len(shape), 1, 1
    for axis in reversed(_order(tensor)):
        step, size = tensor.stride(axis), tensor.shape[axis]
        if step or size == 1:
            steps[axis] = extent if size == 1 else max(extent, step * extent // was)
            extent, was = steps[axis] * shape[axis], (was if size == 1 else step * size)
    return steps


def _order(tensor: Tensor) -> list[int]:
    """The axes, outermost in memory first."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]
