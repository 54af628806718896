"""Whether rows that are all unlike one another are, in half of a batch, what they are in all of it.

Of two rows, however often these come, the median is one of both, the sign of a mean is often that of each,
and their span has no more than two directions. Which forms are asked is left to ``row_questions``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, dtype, nn

from ...graph import Dim
from ...units import Size
from ..calls.call import Call, Depends, Recording
from ..calls.describe import call_and_place
from ..calls.functions import plain_name, tensors
from ..sizes.rerun import replay
from .alike_layers import AlikeLayers
from .results import axes, is_close, is_floating, is_number

__all__ = ["fault_among_unlike", "gathered", "width"]

_Shapes = Mapping[int, tuple[tuple[Size, ...], ...]]
_FACTORS = 1.0, 2.0, 0.5, 1.5, 0.25, 0.75, 1.25, 1.75
"""What rows are taken times, one after another; those of the second half are of the other sign."""
_SPANNING = frozenset({
    "linalg_lstsq", "linalg_pinv", "linalg_qr", "linalg_svd", "lstsq", "orthogonal", "pinv", "pinverse", "qr",
    "svd",
})  # fmt: skip
"""Functions of the directions that rows span: of fewer rows than these are wide, all."""


def gathered(form: Recording, dim: Dim, shapes: _Shapes) -> dict[int, int] | None:
    """The calls of whose rows something without rows is made that other rows go by; None where there is none.

    Each by id, with the axis along which its rows lie. Where rows change their axis, what is made of them
    along it is not told from rows: then there is something, of no call that is known.
    """
    sources: dict[int, frozenset[int]] = {}
    places: dict[int, int] = {}
    found: set[int] = set()
    is_turned = False
    for call in form.calls:
        if call.op == "output":
            continue
        known = [axes(call, i, dim, shapes) for i in range(len(shapes.get(id(call), ())))]
        with_rows = [c for c in call.inputs if id(c) in places and is_floating(c.value)]
        of = frozenset[int]().union(*(sources.get(id(c), ()) for c in call.inputs))
        if any(known):
            found |= of
            places[id(call)] = next(a[0] for a in known if a)
            is_turned |= call.op != "placeholder" and any(
                a != [places[id(c)]] for c in with_rows for a in known if a
            )
        elif call.op != "placeholder" and call.depends & Depends.INPUT:
            sources[id(call)] = of | {id(c) for c in with_rows}
    return {number: places[number] for number in found} if found or is_turned else None


def width(form: Recording) -> int:
    """How wide rows may be of which a form takes what they span; nought where it takes none."""
    spanning = [c for c in form.calls if plain_name(c) in _SPANNING]
    return max(
        (size for c in spanning for i in c.inputs for t in tensors(i.value) for size in t.shape), default=0
    )


@torch.no_grad()
def fault_among_unlike(
    model: nn.Module,
    form: Recording,
    given: Mapping[str, Tensor],
    dim: Dim,
    shapes: _Shapes,
    start: Callable[[], None],
    n: int,
    spread: Mapping[int, int],
    allowed: Mapping[dtype, float],
    *,
    is_counted: bool,
    alike: AlikeLayers | None = None,
) -> str:
    """In words, the first call that gives other rows in half of a batch of ``n`` than in all; or nothing.

    Values of calls that are ``spread``, with their axes, get another sign in the second half, or else the
    inputs do. Numbers that labels weigh, which ``is_counted``, are not compared. Nothing where something
    comes out that is no number. Of layers that are ``alike`` one runs for all.
    """
    batch = _unlike(given, dim, n, is_signed=not spread)
    device = next(iter(batch.values())).device

    def run(begin: int, end: int) -> tuple[dict[tuple[int, int], Tensor], list[Any]]:
        kept: dict[tuple[int, int], Tensor] = {}

        def look(call: Call, value: Any) -> Any:
            axis = spread.get(id(call))
            other = None if axis is None else value * _factors(value, axis, n)[begin:end]
            made = value if other is None else other
            kept.update(((id(call), i), t.detach().clone()) for i, t in enumerate(tensors(made)))
            return other

        start()
        piece = {**batch, **{name: batch[name].narrow(axis, begin, end - begin) for name, axis in dim.where}}
        result = replay(model, form, piece, device, alike.sharing() if alike else None, look=look).result
        return kept, [v for c, v in zip(form.calls[-1].args[0], result, strict=True) if isinstance(c, Call)]

    leaves = [c for c in form.calls[-1].args[0] if isinstance(c, Call)]
    whole, *halves = [run(*ends) for ends in ((0, n), (0, n // 2), (n // 2, n))]
    made = [t for _, values in (whole, *halves) for v in values for t in tensors(v) if not t.is_nested]
    if not all(bool(t.isfinite().all()) for t in made):
        return ""

    def is_other(of: Tensor, parts: Sequence[Tensor], axis: int) -> bool:
        joined = torch.cat([*parts], axis)
        return joined.shape == of.shape and not is_close(of, joined, allowed)

    def differs(call: Call, i: int, of: Any, parts: Sequence[Any]) -> bool:
        if not all(isinstance(t, Tensor) and not t.is_nested for t in (of, *parts)):
            return False
        return any(is_other(of, parts, axis) for axis in axes(call, i, dim, shapes)[:1])

    for call, of, *parts in zip(leaves, whole[1], *(values for _, values in halves), strict=True):
        is_mean = is_number(of) and not is_counted and call.op != "placeholder"
        if differs(call, 0, of, parts):
            break
        if is_mean and not any(is_close(of, (parts[0] + parts[1]) / k, allowed) for k in (1, 2)):
            break
    else:
        return ""
    for each in form.calls[:-1]:
        for i in range(len(shapes.get(id(each), ()))):
            at = id(each), i
            if at in whole[0] and differs(
                each, i, whole[0][at], [kept[at] for kept, _ in halves if at in kept]
            ):
                return f"{call_and_place(each)}, among rows that are unlike"
    return f"{call_and_place(call)}, among rows that are unlike"


def _factors(like: Tensor, axis: int, n: int) -> Tensor:
    """What each of ``n`` rows is taken times, along an axis of a tensor."""
    each = [(1 if i < n // 2 else -1) * _FACTORS[i % 8] * (1 + i // 8 / 8) for i in range(n)]
    return like.new_tensor(each).view(-1, *[1] * (like.ndim - axis - 1))


def _unlike(given: Mapping[str, Tensor], dim: Dim, n: int, *, is_signed: bool) -> dict[str, Tensor]:
    """The tensors with ``n`` rows, none like another: theirs in turn, times numbers, in other orders."""
    out = dict(given)
    for name, axis in dim.where:
        rows = given[name].detach().unbind(axis)
        made = torch.stack([_rolled(rows[i % len(rows)], i // len(rows)) for i in range(n)], axis)
        if made.is_floating_point():
            factors = _factors(made, axis, n)
            made = made * (factors if is_signed else factors.abs())
        out[name] = made
    return out


def _rolled(row: Tensor, by: int) -> Tensor:
    return row.roll(by, -1) if row.ndim else row
