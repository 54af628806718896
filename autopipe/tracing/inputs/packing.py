"""Inputs that hold the rows of all samples one after another, and how many rows are whose.

So come the image patches of vision-language models: ``pixel_values [patches of all images, features]`` beside
``image_grid_thw [images, 3]``, whose rows multiply to the patches of each. Trying what a model takes is left
to ``explore``, cutting a batch to the runtime.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ...errors import InputError
from ...graph import Dim, Packed, batch_dim

__all__ = ["apart", "packed_fault", "packings", "sample_rows"]

_GRID_SIDES = (2, 3)


def packings(dims: Sequence[Dim], given: Mapping[str, torch.Tensor]) -> Iterator[Dim]:
    """The batch with other inputs held to grow with it, the likeliest first.

    The smallest leading size is taken for the batch and larger ones for packed rows; an inner axis of the
    batch's size may be the batch as well.
    """
    leading = [d for d in dims if d.where[0][1] == 0]
    if not leading:
        return
    base = min(leading, key=lambda d: d.example)
    larger = {name: d.example for d in leading if d is not base for name, _ in d.where}
    even = [name for name, rows in larger.items() if rows % base.example == 0]
    grids = {name: _grids(name, [*(n for n, _ in base.where), *even], given) for name in larger}
    packed = tuple(Packed(name, larger[name], grids[name]) for name in larger if name in even or grids[name])
    inner = [d.where for d in dims if d.where[0][1] > 0 and d.example == base.example]
    for also in dict.fromkeys(((), *inner, tuple(itertools.chain(*inner)))):
        for growing in dict.fromkeys((packed, *((p,) for p in packed))):
            if growing or also:
                yield Dim("batch", base.example, base.where + also, growing)


def _grids(name: str, others: Sequence[str], given: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Those of ``others`` whose rows, each multiplied out, add up to the rows of ``name``."""
    return tuple(
        other
        for other in others
        if not (grid := given[other]).is_meta
        and not grid.is_floating_point()
        and grid.dim() == 2
        and grid.shape[1] in _GRID_SIDES
        and sum(map(math.prod, grid.tolist())) == given[name].shape[0]
    )


def apart(
    dims: Sequence[Dim], given: Mapping[str, torch.Tensor]
) -> tuple[tuple[Dim, ...], Mapping[str, torch.Tensor]]:
    """The same with packed rows on an axis of their own behind the samples', where each sample has as many.

    A call of a placeholder packs such tensors again.
    """
    batch = batch_dim(dims)
    if batch is None or not batch.packed or any(p.grids or given[p.op].is_meta for p in batch.packed):
        return (*dims,), given
    unpacked = {p.op: given[p.op].unflatten(0, (batch.example, -1)) for p in batch.packed}
    loose = dataclasses.replace(batch, where=batch.places, packed=())
    return tuple(loose if d is batch else d for d in dims), {**given, **unpacked}


def sample_rows(batch: Dim, packed: Packed, given: Mapping[str, Any]) -> list[int]:
    """How many rows of a packed input belong to each sample: as its grid says, else as many to each.

    Raises :class:`InputError` where the rows are not as many as that makes, or two grids do not agree.
    """
    name, axis = batch.where[0]
    n_samples = given[name].shape[axis]
    told = {tuple(_multiplied(given[grid], n_samples)): grid for grid in packed.grids}
    if len(told) > 1:
        raise InputError(
            f"{' and '.join(told.values())} disagree on whose the rows of {packed.op} are, and were equal at "
            "capture; capture again with an example where they differ"
        )
    for counts, grid in told.items():
        n_rows = given[packed.op].shape[0]
        if sum(counts) == n_rows:
            return list(counts)
        raise InputError(f"{packed.op} has {n_rows} rows, and those of {grid} multiply to {sum(counts)}")
    if said := packed_fault(batch, packed, given):
        raise InputError(said)
    return [given[packed.op].shape[0] // n_samples] * n_samples


def _multiplied(grid: torch.Tensor, n_samples: int) -> Iterator[int]:
    pieces = list(map(math.prod, grid.tolist()))
    n = len(pieces) // n_samples
    return (sum(pieces[i * n : (i + 1) * n]) for i in range(n_samples))


def packed_fault(
    batch: Dim, packed: Packed, given: Mapping[str, Any], shown: Mapping[str, str] | None = None
) -> str:
    """How a packed input has not as many rows for each sample as at capture; "" where it has."""
    (name, axis), rows = batch.where[0], given[packed.op].shape[0]
    n_samples = given[name].shape[axis]
    if rows * batch.example == packed.rows * n_samples:
        return ""
    said = shown or {}
    return (
        f"dim 0 of {said.get(packed.op, packed.op)} grows with dim {axis} of {said.get(name, name)}, "
        f"{packed.rows} rows for {batch.example} at capture; it is {rows} for {n_samples} now and must be "
        f"{packed.rows * n_samples / batch.example:g}"
    )
