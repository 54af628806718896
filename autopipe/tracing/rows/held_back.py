"""Whether rows depend on one another in gradients alone, since code holds some of these back.

A loss over itself, detached, is one whatever the rows; a layer may detach what it is given from so many rows
on. Backwards that are not torch's own are left to ``backwards``, what values tell to ``mixing``.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...graph import Dim
from ..calls.call import Call, Depends, Recording
from ..calls.describe import call_and_place
from ..calls.functions import plain_name, tensors
from ..code.own_code import OwnCode
from ..state.example_data import hooks_kept_back
from .results import ALLOWED, Rows, axes, is_close, is_number

__all__ = ["RowGradients", "gradient_of", "holds_back", "may_hold_back"]

_HOLDS_BACK = frozenset({
    "__float__", "__int__", "data", "detach", "detach_", "inference_mode", "item", "no_grad",
    "set_grad_enabled", "tolist",
})  # fmt: skip
"""What gives values that gradients do not pass."""


def holds_back(code: OwnCode, form: Recording) -> bool:
    """Whether some call may take what gradients are not to pass, of values that inputs make."""
    made = (c for c in form.calls if c.op not in ("placeholder", "get_attr", "output"))
    return any(may_hold_back(code, call) for call in made if call.depends & Depends.INPUT)


def may_hold_back(
    code: OwnCode, call: Call, may_run: Callable[[types.FunctionType], bool] | None = None
) -> bool:
    """Whether a call, or code that it runs, may give values that gradients do not pass.

    Of that code all is looked at, or the functions which ``may_run``.
    """
    return (
        (call.op != "call_module" and plain_name(call) in _HOLDS_BACK)
        or (call.region is not None and call.region.grad is False)
        or (code.is_own(call) and not _HOLDS_BACK.isdisjoint(code.names(call, may_run)))
    )


_OF_LAST = 0.625
"""What the last row weighs beside the first, where both are asked together."""
_Place = tuple[int, int]
"""The id of a call, and the place of a tensor that it gives."""


class _OfTwo(NamedTuple):
    """Gradients of rows a and b: of both, and by row where there are rows."""

    both: dict[_Place, Tensor]
    first: dict[_Place, Tensor]
    last: dict[_Place, Tensor]


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
        self._weights = [p for p in model.parameters() if p.requires_grad and p.numel()]
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
    def _beside(self) -> _OfTwo:
        """Of row a beside b, of b beside a, and of both."""
        made = self._made("ab")
        both = {at: self._of({at: tensor}, (0, -1)) for at, tensor in made.items()}
        rows = {at: tensor for at, tensor in made.items() if self._rows(at)}
        first, last = ({at: self._of({at: t}, (place,)) for at, t in rows.items()} for place in (0, -1))
        return _OfTwo(both, first, last)

    @functools.cached_property
    def _of_two(self) -> str:
        both, first, last = self._beside
        made = self._made("aa"), self._made("bb")
        asked = [at for at in both if all(at in each for each in made)]
        shares = self._shares()
        likely: Sequence[float | None] = [*dict.fromkeys(reversed(shares))] or [None]
        if any(self._are_as_alone(asked, *made, share) for share in likely):
            return ""
        for at in asked:
            a, b = (self._of({at: each[at]}, (place,)) for each, place in zip(made, (0, -1), strict=True))
            if at in first:
                is_of_rows = is_close(first[at], a, ALLOWED) and is_close(last[at], b, ALLOWED)
            else:
                means = [s * a + (1 - s) * b for s in shares]
                is_of_rows = not means or any(is_close(both[at], mean, ALLOWED) for mean in means)
            if not is_of_rows:
                return f"the gradients of {call_and_place(self._calls[at[0]])} are not those of each row"
        return ""

    def _are_as_alone(
        self,
        asked: Sequence[_Place],
        aa: Mapping[_Place, Tensor],
        bb: Mapping[_Place, Tensor],
        share: float | None,
    ) -> bool:
        """Whether all gradients together, each weighed by its size, are those of rows alone.

        A backward of row a beside a tells, and one of b beside b, within as little as each may be off alone.
        A number is a mean with this ``share`` of row a; not looked at without. Row b has another weight than
        a, so that what one takes from the other shows. False where it does not tell.
        """
        both, first, last = self._beside
        weighed: list[tuple[_Place, Tensor, float, float]] = []
        for at in asked:
            if at in first:
                weighed += (at, first[at], 1.0, 0.0), (at, last[at], 0.0, _OF_LAST)
            elif share is not None:
                weighed.append((at, both[at], share, 1 - share))
        takes_any = {at: any(each[at].requires_grad for each in (aa, bb)) for at in asked}
        weighed = [each for each in weighed if takes_any[each[0]] or each[1].any()]
        level = self._level([gradient for _, gradient, *_ in weighed])
        if level is None or not all(gradient.any() for _, gradient, *_ in weighed):
            return False
        expected = found = torch.zeros_like(weighed[0][1])
        of_a, of_b = dict[_Place, float](), dict[_Place, float]()
        for at, gradient, a, b in weighed:
            scale = _scale(gradient)
            expected = expected + scale * (a + b) * gradient
            of_a |= {at: scale * a} if a else {}
            of_b |= {at: scale * b} if b else {}
        for made, place, scales in ((aa, 0, of_a), (bb, -1, of_b)):
            found = found + self._of({at: made[at] for at in scales}, (place,), [*scales.values()])
        return is_close(expected, found, level)

    def _level(self, gradients: Sequence[Tensor]) -> dict[torch.dtype, float] | None:
        """What all of these together may be off, of one kind; None where there are none, or several kinds."""
        kinds = {gradient.dtype for gradient in gradients}
        if len(kinds) != 1 or not kinds <= ALLOWED.keys():
            return None
        return {kind: ALLOWED[kind] / len(gradients) for kind in kinds}

    def _of_more(self, times: int) -> str:
        made, both = self._made("a" * times + "b" * times), self._beside.both
        asked = {at: made[at] for at in both if at in made}
        if self._are_as_of_two(asked, times):
            return ""
        for at, tensor in asked.items():
            many = self._of({at: tensor}, (0, -1))
            if not any(is_close(many, n * both[at], ALLOWED) for n in self._factors(at, times)):
                words = f"the gradients of {call_and_place(self._calls[at[0]])}"
                return f"{words} hang on how many rows there are"
        return ""

    def _are_as_of_two(self, asked: Mapping[_Place, Tensor], times: int) -> bool:
        """Whether all gradients together, each weighed by its size, are what they are of two rows.

        One backward tells, within as little as each may be off alone. False where it does not, as where one
        number is a mean of rows and another a sum.
        """
        both = {at: self._beside.both[at] for at in asked}
        level = self._level([*both.values()])
        if level is None:
            return False
        scales = [*map(_scale, both.values())]
        many = self._of(asked, (0, -1), scales)
        for k in (0, -1):
            each = zip(scales, both.items(), strict=True)
            expected = sum(
                (scale * self._factors(at, times)[k] * gradient for scale, (at, gradient) in each),
                torch.zeros_like(many),
            )
            if is_close(many, expected, level):
                return True
        return False

    def _factors(self, at: _Place, times: int) -> tuple[int, ...]:
        """What gradients may be multiplied by where rows come so many times: a number may be their sum."""
        return (1,) if self._rows(at) else (1, times)

    def _rows(self, at: _Place) -> list[int]:
        return axes(self._calls[at[0]], at[1], self._dim, self._shapes)

    def _of(
        self, made: Mapping[_Place, Tensor], places: Sequence[int], scales: Sequence[float] | None = None
    ) -> Tensor:
        """All weights' gradients of numbers, and of rows in some places."""
        begun = [(tensor, self._rows(at)) for at, tensor in made.items()]
        with torch.enable_grad():
            return gradient_of(begun, self._weights, places, scales)

    @torch.enable_grad()
    def _made(self, rows: str) -> dict[_Place, Tensor]:
        """What the calls make in one run that gradients may begin in: rows, and numbers."""
        kept: dict[_Place, Tensor] = {}

        def look(call: Call, value: Any) -> None:
            if id(call) in self._calls:
                kept.update(((id(call), i), tensor) for i, tensor in enumerate(tensors(value)))

        self._run(rows, look)
        begin = ((at, t) for at, t in kept.items() if _may_begin(t, self._rows(at)))
        return {at: t for at, t in begin if not t.isnan().any()}


def _scale(gradient: Tensor) -> float:
    return 1 / (float(gradient.abs().max()) or 1.0)


def _may_begin(value: Tensor, rows: Sequence[int]) -> bool:
    """Whether gradients may begin at a tensor: a number, or one with rows."""
    return value.is_floating_point() and (bool(rows) or is_number(value))


def _seed(value: Tensor, rows: Sequence[int], places: Sequence[int]) -> Tensor:
    """The gradient to begin with: at a number, or at the rows in some places."""
    if not rows:
        return torch.ones_like(value)
    seed = torch.zeros_like(value)
    for place in places:
        row = seed.select(rows[0], place)
        row.copy_(torch.linspace(1, 2, row.numel(), device=row.device).view(row.shape))
    return seed


def gradient_of(
    made: Sequence[tuple[Tensor, Sequence[int]]],
    weights: Sequence[Tensor],
    places: Sequence[int] = (0, -1),
    scales: Sequence[float] | None = None,
) -> Tensor:
    """The gradients of all weights, as one row of numbers of the narrowest type among them; none without any.

    They begin at numbers, and in some ``places`` of tensors that come with the axes of their rows, of one as
    large as it is of the ``scales``, or 1.
    """
    sized = zip(made, scales or [1.0] * len(made), strict=True)
    begun = ((t, rows, scale) for (t, rows), scale in sized if t.requires_grad and _may_begin(t, rows))
    seeds = [(t, _seed(t, rows, places) * scale) for t, rows, scale in begun]
    if not weights:
        return torch.zeros(0, device="cpu")
    found: Sequence[Tensor | None] = [None] * len(weights)
    if seeds:
        values, starts = zip(*seeds, strict=True)
        with hooks_kept_back(weights):
            found = torch.autograd.grad(values, weights, starts, retain_graph=True, allow_unused=True)
    least = min((t.dtype for t in (*(t for t, _ in seeds), *weights)), key=lambda dtype: dtype.itemsize)
    each = (torch.zeros_like(w) if g is None else g for w, g in zip(weights, found, strict=True))
    return torch.cat([(g if g.layout is torch.strided else g.to_dense()).flatten().to(least) for g in each])
