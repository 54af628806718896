"""Puts other values of rows where a number is made of them: what the example has may tell nothing.

A loss is 0 on an example whose mask lets nothing through, or under a head that starts at zeros; and rows
weigh alike where all are on one side of a limit. Comparing the numbers is left to ``results``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...graph import Dim
from ...units import Size, symbol
from ..calls.call import Call, Depends, Recording, behind
from ..calls.labels import label_options
from ..inputs.contents import is_whole
from .data_dependent import Change
from .results import axes
from .varied_data import gathers

__all__ = ["lifted", "truths_apart"]


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
        return value + added[id(call)]

    return change


def truths_apart(
    model: nn.Module,
    form: Recording,
    given: Mapping[str, Tensor],
    dim: Dim,
    shapes: Mapping[int, tuple[tuple[Size, ...], ...]],
) -> Iterator[Change]:
    """What makes all that rows are asked true of row a, and of row b half of it, then none.

    Nothing where the form makes nothing of all rows together but means over labels. What is asked of whole
    numbers by which rows are cut, as where lengths pack them, is not true of other places than these leave.
    """
    asked: dict[int, int] = {}
    cutting = _cutting(form)
    for call in form.calls:
        is_cut = (
            bool(cutting) and all(is_whole(c.value) for c in call.inputs) and bool(behind(call) & cutting)
        )
        if _is_truth(call) and not (is_cut or any(map(_is_truth, call.inputs))):
            asked |= {id(call): axis for axis in axes(call, 0, dim, shapes)[:1]}
    if not asked or not gathers(model, form, given, dim, shapes):
        return

    is_much = any(call.value.ndim > 1 for call in form.calls if id(call) in asked)
    for share in (0.5, 0.0) if is_much else (0.0,):
        yield functools.partial(_turned, asked, share)


def _turned(asked: Mapping[int, int], share: float, rows: str, call: Call, value: Any) -> Tensor | None:
    """Truths all true but of row b, where a ``share`` of them is that lies along the last axis."""
    axis = asked.get(id(call))
    if axis is None or value.shape[axis] != len(rows):
        return None
    truths = torch.ones_like(value)
    for place in (place for place, row in enumerate(rows) if row == "b"):
        of_row = torch.atleast_1d(truths.select(axis, place))
        of_row[..., int(share * of_row.shape[-1]) :] = False
    return truths


def _cutting(form: Recording) -> set[Call]:
    """The whole numbers among a form's inputs that sizes of others are made of."""
    cut = (c for c in form.calls if c.depends & Depends.DATA)
    made = set[Call]().union(*(behind(c) for c in cut if not any(d.depends & Depends.DATA for d in c.inputs)))
    return {call for call in made if call.op == "placeholder" and is_whole(call.value)}


def _is_truth(call: Call) -> bool:
    is_asked = call.op in ("call_function", "call_method") and bool(call.depends & Depends.INPUT)
    return is_asked and isinstance(call.value, Tensor) and call.value.dtype is torch.bool
