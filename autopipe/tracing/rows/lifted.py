"""Lifts the values of rows where a number is made of them, so that one that is 0 tells a sum from a mean.

A loss is 0 on an example whose mask lets nothing through, or under a head that starts at zeros. Comparing the
numbers is left to ``results``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...graph import Dim
from ...units import Size, symbol
from ..calls.call import Call, Recording
from ..calls.labels import label_options
from .data_dependent import Change

__all__ = ["lifted"]


def lifted(
    model: nn.Module, form: Recording, dim: Dim, shapes: Mapping[int, tuple[tuple[Size, ...], ...]]
) -> Change:
    """What adds to the last values that have rows, to each another number; of truth values all become true.

    Those that a loss over labels takes stay, as labels are.
    """
    added: dict[int, int] = {}
    rows = symbol(dim.name)

    def has_rows(call: Call) -> bool:
        sizes = (n for shape in shapes.get(id(call), ()) for n in shape)
        return any(rows in getattr(n, "free_symbols", ()) for n in sizes)

    for call in form.calls:
        if not (has_rows(call) or call.is_size or label_options(model, call) is not None):
            for last in filter(has_rows, call.inputs):
                added.setdefault(id(last), 1 + len(added))

    def change(_: str, call: Call, value: Any) -> Tensor | None:
        if id(call) not in added or not isinstance(value, Tensor):
            return None
        if value.dtype is torch.bool:
            return torch.ones_like(value)
        return value + torch.tensor(added[id(call)]).to(value)

    return change
