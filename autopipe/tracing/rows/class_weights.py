"""Whether a loss weighs the classes of labels by what its batch holds, as by how often each class comes.

Of two rows each comes as often beside the other as alone, so that two, turned in ``mixing``, may not show it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...graph import Dim
from ..calls.call import Call, Depends, Recording
from ..calls.describe import call_and_place
from ..calls.labels import label_options
from ..sizes.rerun import replay
from ..state.state import seed
from .results import ROUNDED, is_close

__all__ = ["by_class_weights"]


@torch.no_grad()
def by_class_weights(
    model: nn.Module,
    form: Recording,
    given: Mapping[str, Tensor],
    dim: Dim,
    device: torch.device,
    start: Callable[[], None],
) -> str:
    """In words, what weighs classes otherwise where all rows of the batch are its first, or its last.

    Three runs of a form that makes such weights from its inputs, else none; ``start`` sets mode and state.
    """
    over_labels = filter(None, (label_options(model, call) for call in form.calls))
    weights = [options["weight"] for options in over_labels]
    made = [w for w in weights if isinstance(w, Call) and w.depends & Depends.INPUT]
    if not made:
        return ""
    batches = (given, *(_repeated(given, dim, row) for row in (0, -1)))
    whole, *alike = (_values(model, form, made, batch, device, start) for batch in batches)
    for call in made:
        if any(not is_close(whole[id(call)], one[id(call)], ROUNDED) for one in alike):
            return f"{call_and_place(call)} weighs the classes of labels by all rows"
    return ""


def _repeated(given: Mapping[str, Tensor], dim: Dim, row: int) -> dict[str, Tensor]:
    """The batch with one of its rows in the place of each."""
    out = dict(given)
    for name, axis in dim.where:
        tensor = given[name]
        chosen = torch.stack([tensor.detach().select(axis, row)] * tensor.shape[axis], axis)
        out[name] = chosen.requires_grad_(tensor.requires_grad)
    return out


def _values(
    model: nn.Module,
    form: Recording,
    made: list[Call],
    batch: Mapping[str, Tensor],
    device: torch.device,
    start: Callable[[], None],
) -> dict[int, Tensor]:
    kept: dict[int, Tensor] = {}
    start()
    seed(device)
    replay(model, form, batch, device, look=functools.partial(_keep, {id(c) for c in made}, kept))
    return kept


def _keep(wanted: set[int], kept: dict[int, Tensor], call: Call, value: Any) -> None:
    if id(call) in wanted:
        kept[id(call)] = value.detach().clone()
