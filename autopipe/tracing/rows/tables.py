"""Tables of a model's that code takes places of, by number as rows may do; weights that are nought so far.

A table of ones, or a bias for each row that is nought so far, gives every row the same until it is trained;
asking about rows while such tables hold other values is left to ``row_questions``. What is taken times
weights that are nought, as a gate or a last layer at its start, is not seen until they are something else. Of
whole numbers other ones may be no places at all: what was found of rows holds for those alone that are there,
which is left to ``runs.assumptions``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..calls.functions import storages, tensors

__all__ = ["PICKS", "are_alike", "are_by_number", "held_tables", "noughts", "picked", "uneven"]

PICKS = frozenset({
    "__getitem__", "chunk", "embedding", "gather", "index_select", "narrow", "select", "split", "take",
    "take_along_dim", "tensor_split", "unbind", "unflatten",
})  # fmt: skip
"""Functions that take places of a tensor."""


def held_tables(model: nn.Module) -> dict[int, tuple[str, Tensor]]:
    """Of which places may be taken, with their names, by the memory that they lie in."""
    found: dict[int, tuple[str, Tensor]] = {}
    for path, module in model.named_modules():
        for name, held in {**vars(module), **module._buffers, **module._parameters}.items():
            if isinstance(held, Tensor) and _is_plain(held):
                found.update((number, (f"{path}.{name}".lstrip("."), held)) for number in storages(held))
    return found


def picked(held: Mapping[int, tuple[str, Tensor]], args: Any, kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """The tables among what a function is given; of those in :data:`PICKS` it takes places."""
    yield from (held[n] for t in tensors((args, kwargs)) for n in storages(t) if n in held)


def are_by_number(args: Any, kwargs: Any, table: Tensor, result: Any, n_rows: int) -> bool:
    """Whether the places that a function takes of a table are as many as there are rows, in their order."""
    if not (args and isinstance(args[0], Tensor) and storages(args[0]) & storages(table)):
        return False
    others = (t for t in tensors((args[1:], kwargs)) if t is not table)
    is_in_order = all(t.is_floating_point() or _counts_up(t) for t in others)
    return is_in_order and any(n_rows in t.shape for t in tensors(result))


def _counts_up(places: Tensor) -> bool:
    return torch.equal(places, torch.arange(places.numel(), device=places.device).view(places.shape))


def are_alike(table: Tensor) -> bool:
    """Whether it holds other numbers than whole ones, the first two places along some axis the same."""
    if not table.is_floating_point():
        return False
    axes = (a for a, size in enumerate(table.shape) if size > 1)
    return any(torch.equal(table.select(a, 0), table.select(a, 1)) for a in axes)


def noughts(model: nn.Module) -> dict[str, Tensor]:
    """By name the weights and buffers that are nought throughout, but for what is only added."""
    held = (*model.named_parameters(), *model.named_buffers())
    return {name: t for name, t in held if not _is_added(name) and _is_nought(t)}


def _is_added(name: str) -> bool:
    last = name.rpartition(".")[2]
    return "bias" in last or last in ("running_mean", "num_batches_tracked")


def _is_nought(tensor: Tensor) -> bool:
    is_there = not tensor.is_meta and tensor.layout is torch.strided and not nn.parameter.is_lazy(tensor)
    if not is_there or not tensor.numel() or not (tensor.is_floating_point() or tensor.dtype is torch.bool):
        return False
    return not bool(tensor.flatten()[0]) and not bool(tensor.any())


@contextlib.contextmanager
def uneven(tables: Collection[Tensor]) -> Iterator[None]:
    """Within it no two places of the tables hold the same; those of truths hold that all is so."""
    kept = [table.detach().clone() for table in tables]
    try:
        for table, before in zip(tables, kept, strict=True):
            if table.dtype is torch.bool:
                table.data.fill_(True)
                continue
            ramp = torch.linspace(0.25, 0.75, table.numel(), device=table.device).view(table.shape)
            table.data.add_(ramp * (before.abs().nan_to_num(0, 0, 0).max() or 1.0))
        yield
    finally:
        for table, before in zip(tables, kept, strict=True):
            table.data.copy_(before)


def _is_plain(tensor: Tensor) -> bool:
    is_there = not tensor.is_meta and tensor.layout is torch.strided and not nn.parameter.is_lazy(tensor)
    return is_there and not tensor.is_complex() and tensor.numel() > 1
