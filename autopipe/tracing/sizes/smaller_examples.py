"""Fewer rows, positions and pixels of an example, which are enough to record a model with, and faster.

Whether the capture fits the example itself is left to ``capture``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Set

import torch

from ...graph import Dim
from ..inputs.arguments import Inputs
from ..inputs.contents import is_whole
from .dims import candidates

__all__ = ["alike_rows", "are_free", "few_pixels", "few_rows", "few_tokens"]

_FEW_TOKENS, _FEW_PIXELS = 16, 64
_MOST_COMPARED = 16


def few_rows(inputs: Inputs, device: torch.device) -> dict[Dim, int]:
    """The batch and the few rows that are enough to record a model with; empty where its own size is as good.

    A batch is cut only where every tensor has it, so that no index into rows comes to point outside; and only
    on a CPU, where time grows with it and such an index would raise.
    """
    batches = [d for d in candidates(inputs) if d.where[0][1] == 0]
    tensors = {n: inputs.shapes[i] for i, n in enumerate(inputs.names) if n is not None}
    others = {size for shape in tensors.values() for size in shape[1:]}
    few = next(n for n in itertools.count(2) if n not in others)
    if not batches or batches[0].name != "batch" or few == batches[0].example:
        return {}
    batch = batches[0]
    if batch.example == 1:
        return {batch: 2}
    is_everywhere = all((n, 0) in batch.where for n, shape in tensors.items() if shape)
    return {batch: few} if batch.example > 2 * few and is_everywhere and device.type == "cpu" else {}


def alike_rows(tensors: Mapping[str, torch.Tensor], cut: Mapping[Dim, int]) -> dict[Dim, int]:
    """How many rows of a batch that is ``cut`` to skip behind the first, to have one that is less like it.

    Of rows of one label no two tell what a model makes of labels, and of rows that leave out as many of them
    none what these weigh. Some of the first are compared.
    """
    batch = next((d for d in cut if d.name == "batch"), None)
    if batch is None or cut[batch] >= batch.example:
        return {}
    n = min(batch.example - cut[batch] + 2, _MOST_COMPARED)
    each = [_unlike_first(tensors[name].detach(), axis, n) for name, axis in batch.where]
    return {batch: int(torch.stack(each).sum(0).argmax())}


def _unlike_first(tensor: torch.Tensor, axis: int, n: int) -> torch.Tensor:
    """How unlike each of ``n`` rows behind the first is: whether another, and with another count below zero.

    Zero for all where that cannot be told.
    """
    is_dense = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if not is_dense or tensor.is_nested or tensor.is_quantized:
        return torch.zeros(n - 1, dtype=torch.int64, device="cpu")
    rows = tensor.movedim(axis, 0)[:n]
    is_other = (rows[1:] != rows[:1]).reshape(n - 1, math.prod(rows.shape[1:])).any(1).long()
    if not is_whole(tensor):
        return is_other
    n_left_out = (rows < 0).reshape(n, math.prod(rows.shape[1:])).sum(1)
    return is_other + (n_left_out[1:] != n_left_out[:1])


def few_tokens(inputs: Inputs, device: torch.device) -> dict[Dim, int]:
    """The length and the few positions that are enough to record a model of tokens alone; else empty.

    It is cut only where all tensors are ``[batch, length]`` and hold no floats, and only on a CPU.
    """
    shapes = set(inputs.shapes.values())
    if len(shapes) != 1 or device.type != "cpu" or any(t.is_floating_point for t in inputs.dtypes.values()):
        return {}
    (shape,) = shapes
    few = _FEW_TOKENS + (_FEW_TOKENS in shape)
    if len(shape) != 2 or shape[1] <= 4 * few:
        return {}
    lengths = [d for d in candidates(inputs) if {axis for _, axis in d.where} == {1}]
    return {lengths[0]: few} if len(lengths) == 1 else {}


def few_pixels(inputs: Inputs, device: torch.device) -> dict[Dim, int]:
    """The sides of square images and the few pixels that are enough to record a model of them; else empty.

    They are cut only where all tensors are images ``[batch, channels, side, side]``, and only on a CPU.
    """
    shapes = set(inputs.shapes.values())
    are_floats = all(t.is_floating_point for t in inputs.dtypes.values())
    if len(shapes) != 1 or device.type != "cpu" or not are_floats:
        return {}
    (shape,) = shapes
    if len(shape) != 4 or shape[2] != shape[3] or shape[2] < 2 * _FEW_PIXELS or _FEW_PIXELS in shape:
        return {}
    return {d: _FEW_PIXELS for d in candidates(inputs) if {axis for _, axis in d.where} <= {2, 3}}


def are_free(cut: Set[tuple[str, int]], dims: Iterable[Dim]) -> bool:
    """Whether the (input, axis) places that were ``cut`` may all vary, and no others with them."""
    together = [{*d.where} for d in dims if not d.packed and not cut.isdisjoint(d.where)]
    return set().union(*together) == cut
