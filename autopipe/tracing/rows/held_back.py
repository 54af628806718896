"""Whether rows depend on one another in gradients alone, since code holds some of these back.

A loss over itself, detached, is one whatever the rows; a layer may detach what it is given from so many rows
on. Backwards that are not torch's own are left to ``backwards``, what values tell to ``mixing``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...graph import Dim
from ..calls.call import Call, Depends, Recording
from ..calls.describe import call_and_place
from ..calls.functions import plain_name, tensors
from ..code.own_code import OwnCode
from .results import ALLOWED, Rows, axes, is_close, is_number

__all__ = ["RowGradients", "gradient_of", "holds_back"]

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


class RowGradients:
    """What rows make of the gradients of some calls, in runs of a form that draws no noise.

    ``run`` runs the form on rows a and b in places. What has rows is to have the gradients of row a beside b
    as beside a; a number those that are the mean of both rows', with one of the ``shares`` for row a, or
    whatever they are where there are none. What is no number has no gradients to tell by, as before an
    observer has seen any.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Rows,
        calls: Sequence[Call],
        shares: Callable[[], Sequence[float]],
        dim: Dim,
        shapes: Any,
    ) -> None:
        self._weights = [p for p in model.parameters() if p.requires_grad]
        self._calls = {id(call): call for call in calls}
        self._run, self._shares, self._dim, self._shapes = run, shares, dim, shapes

    def fault(self, more: Sequence[int] = ()) -> str:
        """In words, the first call whose gradients are not those that rows alone make; or nothing.

        On ``more`` rows, so many of each, all are to be what they are on two.
        """
        if not self._weights:
            return ""
        return self._of_two or next(filter(None, map(self._of_more, more)), "")

    @functools.cached_property
    def _beside(self) -> list[dict[tuple[int, int], Tensor]]:
        """Of both rows, of row a beside b, and of b beside a."""
        return self._made("ab", (0, -1), (0,), (-1,))

    @functools.cached_property
    def _of_two(self) -> str:
        both, first, last = self._beside
        (aa,), (bb,), shares = self._made("aa", (0,)), self._made("bb", (-1,)), self._shares()
        for key in both.keys() & aa.keys() & bb.keys():
            call, a, b = self._calls[key[0]], aa[key], bb[key]
            if axes(call, key[1], self._dim, self._shapes):
                is_of_rows = is_close(first[key], a, ALLOWED) and is_close(last[key], b, ALLOWED)
            else:
                means = [s * a + (1 - s) * b for s in shares]
                is_of_rows = not means or any(is_close(both[key], mean, ALLOWED) for mean in means)
            if not is_of_rows:
                return f"the gradients of {call_and_place(call)} are not those of each row"
        return ""

    def _of_more(self, times: int) -> str:
        both, (many,) = self._beside[0], self._made("a" * times + "b" * times, (0, -1))
        for key in both.keys() & many.keys():
            call = self._calls[key[0]]
            factors = (1,) if axes(call, key[1], self._dim, self._shapes) else (1, times)
            if not any(is_close(many[key], n * both[key], ALLOWED) for n in factors):
                return f"the gradients of {call_and_place(call)} hang on how many rows there are"
        return ""

    @torch.enable_grad()
    def _made(self, rows: str, *begun: Sequence[int]) -> list[dict[tuple[int, int], Tensor]]:
        """Of one run, all weights' gradients of each call's tensors, for each of the places they begin in."""
        kept: dict[tuple[int, int], Tensor] = {}

        def look(call: Call, value: Any) -> None:
            if id(call) in self._calls:
                kept.update(((id(call), i), tensor) for i, tensor in enumerate(tensors(value)))

        self._run(rows, look)
        found: list[dict[tuple[int, int], Tensor]] = [{} for _ in begun]
        for (number, i), tensor in kept.items():
            along = axes(self._calls[number], i, self._dim, self._shapes)
            if tensor.isnan().any():
                continue
            for places, made in zip(begun, found, strict=True):
                if _seed(tensor, along, places) is not None:
                    made[number, i] = gradient_of([(tensor, along)], self._weights, places)
        return found


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
        found = torch.autograd.grad(values, weights, begun, retain_graph=True, allow_unused=True)
    least = min((t.dtype for t in (*(t for t, _ in seeds), *weights)), key=lambda dtype: dtype.itemsize)
    each = (torch.zeros_like(w) if g is None else g for w, g in zip(weights, found, strict=True))
    return torch.cat([(g if g.layout is torch.strided else g.to_dense()).flatten().to(least) for g in each])
