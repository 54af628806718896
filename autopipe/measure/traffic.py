"""Bytes that one kernel reads and writes, from the shapes of its tensors.

Every tensor counts whole that it is given, and every one that it gives, but for what it looks up in a table
or writes into one, and for memory that it only writes. Its FLOPs are left to ``flops``, watching kernels run
to ``kernel_counts``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .flops import operator_name

__all__ = ["moved_bytes"]

Call = tuple[Any, ...]


def moved_bytes(func: Any, args: Call, read: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    """Bytes of one call: ``read`` are the tensors it is given, ``made`` those it gives.

    >>> table, ids = torch.ones(1000, 8), torch.zeros(3, dtype=torch.long)
    >>> moved_bytes(torch.ops.aten.embedding.default, (table, ids), [table, ids], [torch.ones(3, 8)])
    216
    """
    n = sum(map(_touched, read)) + sum(map(_touched, made))
    table = args[0] if args and isinstance(args[0], Tensor) else None
    if table is None or table.layout is not torch.strided:
        return n
    whole = _touched(table)
    name = operator_name(func)
    if name in _WRITES_ALL:
        return n - whole
    looked, written = _LOOKED_UP.get(name), _WRITTEN_IN.get(name)
    if looked is not None:
        return n - max(0, whole - looked(args) * table.element_size())
    if written is not None:  # read and written
        return n - 2 * max(0, whole - written(args) * table.element_size())
    return n


def _touched(tensor: Tensor) -> int:
    """Bytes a kernel touches of a tensor: an expanded one is read where it lies."""
    spans = [n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    n = tensor.element_size()
    for size in spans:
        n *= size
    return n if tensor.numel() else 0


def _rows(args: Call) -> int:
    """Elements of a table's rows, one for each of the ids that come after it."""
    return int(args[1].numel() * args[0].shape[-1])


def _slices(args: Call) -> int:
    """Elements of a tensor's slices along a dim, one for each of the places that come after that."""
    table, dim, places = args[:3]
    return int(places.numel() * (table.numel() // max(1, table.shape[dim]))) if table.dim() else 1


def _each(args: Call) -> int:
    """An element for each of the places, which come after a dim."""
    return int(args[2].numel())


def _taken(args: Call) -> int:
    return int(args[1].numel())


def _indexed(args: Call) -> int:
    """Elements at places by some of the dims; all of the tensor by a mask, whose marks data decide."""
    table, places = args[:2]
    found = [x for x in places if x is not None]
    if any(x.dtype in (torch.bool, torch.uint8) for x in found):
        return int(table.numel())
    rest = [n for n, x in zip(table.shape, [*places, *[None] * table.dim()], strict=False) if x is None]
    return math.prod(torch.broadcast_shapes(*(x.shape for x in found))) * math.prod(rest)


_LOOKED_UP: dict[str, Callable[[Call], int]] = {
    "aten::embedding": _rows,
    "aten::_embedding_bag": _rows,
    "aten::_embedding_bag_forward_only": _rows,
    "aten::index_select": _slices,
    "aten::gather": _each,
    "aten::take": _taken,
    "aten::index": _indexed,
    "aten::_unsafe_index": _indexed,
}
"""Elements of its first tensor that an op reads, by what looks up places there."""

_WRITTEN_IN: dict[str, Callable[[Call], int]] = {
    "aten::index_add_": _slices,
    "aten::index_copy_": _slices,
    "aten::index_fill_": _slices,
    "aten::scatter_": _each,
    "aten::scatter_add_": _each,
    "aten::scatter_reduce_": _each,
    "aten::put_": _taken,
    "aten::index_put_": _indexed,
    "aten::_index_put_impl_": _indexed,
}
"""Elements of its first tensor that an op reads and writes, by what writes at places there."""

_WRITES_ALL = frozenset(
    f"aten::{name}_" for name in ("copy", "zero", "fill", "normal", "uniform", "bernoulli", "exponential")
)
"""What overwrites its first tensor without reading it."""
