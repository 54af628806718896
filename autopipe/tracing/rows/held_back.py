"""Whether rows depend on one another in gradients alone, since code holds some of these back.

A loss over itself, detached, is one whatever the rows; a layer may detach what it is given from so many rows
on. Backwards that are not torch's own are left to ``backwards``, what values tell to ``mixing``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...graph import Dim
from ..calls.call import Call, Depends, Recording
from ..calls.describe import call_and_place
from ..calls.functions import plain_name, tensors
from ..code.own_code import OwnCode
from .results import ALLOWED, Rows, axes, is_close, is_number

__all__ = ["gradient_of", "holds_back", "mixed_in_gradients"]

_HOLDS_BACK = frozenset({
    "__float__", "__int__", "data", "detach", "detach_", "inference_mode", "item", "no_grad",
    "set_grad_enabled", "tolist",
})  # fmt: skip
"""What gives values that gradients do not pass."""


def holds_back(code: OwnCode, form: Recording) -> bool:
    """Whether some call may take what gradients are not to pass, of values that inputs make."""
    return any(
        (call.op != "call_module" and plain_name(call) in _HOLDS_BACK)
        or (call.region is not None and call.region.grad is False)
        or (code.is_own(call) and not _HOLDS_BACK.isdisjoint(code.names(call)))
        for call in form.calls
        if call.depends & Depends.INPUT and call.op not in ("placeholder", "get_attr", "output")
    )


def mixed_in_gradients(
    model: nn.Module,
    run: Rows,
    calls: Sequence[Call],
    shares: Sequence[float],
    dim: Dim,
    shapes: Any,
    more: Sequence[int] = (),
) -> str:
    """In words, the first of some calls whose gradients are not those that rows alone make; or nothing.

    ``run`` runs a form that draws no noise on rows a and b in places. What has rows is to have the gradients
    of row a beside b as beside a; a number those that are the mean of both rows', with one of the ``shares``
    for row a, or whatever they are where there are none. On ``more`` rows, so many of each, all are to be
    what they are on two. What is no number has no gradients to tell by, as before an observer has seen any.
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    named = {id(call): call for call in calls}
    if not weights:
        return ""

    def made(rows: str, places: Sequence[int] = (0, -1)) -> dict[tuple[int, int], Tensor]:
        kept: dict[tuple[int, int], Tensor] = {}

        def look(call: Call, value: Any) -> None:
            if id(call) in named:
                kept.update(((id(call), i), tensor) for i, tensor in enumerate(tensors(value)))

        run(rows, look)
        found = {}
        for (number, i), tensor in kept.items():
            along = axes(named[number], i, dim, shapes)
            if not tensor.isnan().any() and _seed(tensor, along, places) is not None:
                found[number, i] = gradient_of([(tensor, along)], weights, places)
        return found

    with torch.enable_grad():
        first, last, both = made("ab", (0,)), made("ab", (-1,)), made("ab")
        aa, bb = made("aa", (0,)), made("bb", (-1,))
        for key in both.keys() & aa.keys() & bb.keys():
            call, a, b = named[key[0]], aa[key], bb[key]
            if axes(call, key[1], dim, shapes):
                is_of_rows = is_close(first[key], a, ALLOWED) and is_close(last[key], b, ALLOWED)
            else:
                means = [s * a + (1 - s) * b for s in shares]
                is_of_rows = not means or any(is_close(both[key], mean, ALLOWED) for mean in means)
            if not is_of_rows:
                return f"the gradients of {call_and_place(call)} are not those of each row"
        for times in more:
            for key, there in made("a" * times + "b" * times).items():
                call = named[key[0]]
                factors = (1,) if axes(call, key[1], dim, shapes) else (1, times)
                if key in both and not any(is_close(there, n * both[key], ALLOWED) for n in factors):
                    return f"the gradients of {call_and_place(call)} hang on how many rows there are"
    return ""


def _seed(value: Tensor, rows: Sequence[int], places: Sequence[int]) -> Tensor | None:
    """The gradient to begin with: at a number, or at the rows in some places; None at anything else."""
    if not value.is_floating_point() or not (rows or is_number(value)):
        return None
    if not rows:
        return torch.ones_like(value)
    seed = torch.zeros_like(value)
    for place in places:
        row = seed.select(rows[0], place)
        row.copy_(torch.linspace(1, 2, row.numel(), device=row.device).view(row.shape))
    return seed


def gradient_of(
    made: Sequence[tuple[Tensor, Sequence[int]]], weights: Sequence[Tensor], places: Sequence[int] = (0, -1)
) -> Tensor:
    """The gradients of all weights, as one row of numbers of the narrowest type among them.

    They begin at numbers, and in some ``places`` of tensors that come with the axes of their rows.
    """
    seeds = [(t, s) for t, rows in made if t.requires_grad and (s := _seed(t, rows, places)) is not None]
    found: Sequence[Tensor | None] = [None] * len(weights)
    if seeds and weights:
        values, begun = zip(*seeds, strict=True)
        found = torch.autograd.grad(values, weights, begun, allow_unused=True)
    least = min((t.dtype for t in (*(t for t, _ in seeds), *weights)), key=lambda dtype: dtype.itemsize)
    each = (torch.zeros_like(w) if g is None else g for w, g in zip(weights, found, strict=True))
    return torch.cat([(g if g.layout is torch.strided else g.to_dense()).flatten().to(least) for g in each])
