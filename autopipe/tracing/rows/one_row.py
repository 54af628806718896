"""Whether a form is right for a batch of one row: ``squeeze()`` drops its axis, and batch norm takes no such.

The model's own code may ask whether a row is alone, and give it something else. Keeping more rows to a
microbatch is left to ``runtime``, planning for it to ``api``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...graph import Dim, batch_dim
from ...units import Size
from ..calls.call import Call, Recording
from ..calls.describe import call_and_place
from ..calls.faults import of_models
from ..calls.functions import tensors
from ..code.own_code import HOOKS
from ..runs.session import Session
from ..sizes.trials import first_line
from ..sizes.variation import Variation
from .alike_layers import AlikeLayers
from .held_back import gradient_of
from .mixing import rows_of
from .noise import EvenNoise, NoDropout, is_drawn
from .results import ALLOWED, ROUNDED, Rows, axes, extent, is_close, is_number
from .row_questions import if_told
from .varied_data import layer_kind

__all__ = ["fault_in_one_row"]

_Shapes = Mapping[int, tuple[tuple[Size, ...], ...]]


@torch.no_grad()
def fault_in_one_row(
    session: Session,
    form: Recording,
    given: Mapping[str, Tensor],
    variation: Variation,
    tail: Collection[str],
    training: bool,
) -> str:
    """In words, the first call ahead of the ``tail`` that one row is not to one as more are; or "".

    It has other axes then, or fails, as it does not with two, or code of the model gives a row something else
    alone than beside itself. A form that asks for more rows has no fault. Of torch's layers of one kind that
    were seen to do the same, one runs for all where that goes well; the model's own code may do otherwise for
    a single row, whatever it did for more.
    """
    dim, output, shapes = batch_dim(variation.dims), form.calls[-1], variation.shapes
    if dim is None or dim.packed or dim.example < 2 or not variation.takes_rows(1):
        return ""
    told = dim, session.device, partial(session.start, training)
    if not any(c.name not in tail and session.code.is_own(c) for c in form.calls):
        run = partial(rows_of, session.model, form, given, *told, alone=True)
        alike: AlikeLayers | None = session.code.alike.get(output)
        if alike is not None and alike.is_worth_it:
            alike = alike.of_kind(partial(layer_kind, session.model))
            if alike.is_worth_it and not _fault(form, run(alike=alike), shapes, tail)[0]:
                return ""
        return _fault(form, run(), shapes, tail)[0]
    gave = (session.code.gave.get((output, mode)) for mode in (training, False))
    batch, _, twice = next(filter(None, gave), ({}, [], []))
    is_noisy = training and any(c.is_random for c in form.calls)
    run_within = partial(rows_of, session.model, form, {**given, **batch}, *told, alone=True)
    still = NoDropout if is_noisy else contextlib.nullcontext
    run_still = run_within(around=lambda rows: still())
    fault, made = _fault(form, run_still, shapes, tail)
    if not fault and any(c.hint in HOOKS and c.name not in tail for c in form.calls):
        weights = [p for p in session.model.parameters() if p.requires_grad]
        fault = if_told(_of_gradients, form, run_still, weights, dim, shapes, tail)
    alone = (words for name, words in session.code.alone.get((output, training), ()) if name not in tail)
    fault = fault or next(alone, "")
    if fault or not made or (twice and not tail and _are_same(form, made, twice, dim, shapes)):
        return fault
    other = if_told(_first_other, form, run_still, dim, shapes, tail)
    if is_noisy and is_drawn(session.device):
        run_evenly = run_within(around=lambda rows: EvenNoise(session.device, any_op=True))
        other = if_told(_first_other, form, run_evenly, dim, shapes, tail)
    return other


def _are_same(form: Recording, alone: list[Any], twice: list[Any], dim: Dim, shapes: _Shapes) -> bool:
    """Whether all leaves of one row are those of the same twice."""
    pairs = zip(_leaves(form), alone, twice, strict=True)
    return not any(_is_other(c, 0, a, aa, dim, shapes) for c, a, aa in pairs)


def _leaves(form: Recording) -> list[Call]:
    return [c for c in form.calls[-1].args[0] if isinstance(c, Call)]


def _first_other(form: Recording, run: Rows, dim: Dim, shapes: _Shapes, tail: Collection[str]) -> str:
    """In words, the first call ahead of the ``tail`` that gives row a alone something else than twice."""
    seen: dict[str, dict[tuple[int, int], Tensor]] = {"a": {}, "aa": {}}

    def keep(rows: str, call: Call, value: Any) -> None:
        seen[rows].update(((id(call), i), t.detach().clone()) for i, t in enumerate(tensors(value)))

    for rows in seen:
        run(rows, partial(keep, rows))
    leaves = _leaves(form)
    for call in (c for c in form.calls[:-1] if c.name not in tail):
        for i in range(len(shapes.get(id(call), ()))):
            alone, twice = (kept.get((id(call), i)) for kept in seen.values())
            is_asked = call in leaves or bool(axes(call, i, dim, shapes))
            if is_asked and _is_other(call, i, alone, twice, dim, shapes):
                return f"{call_and_place(call)} gives a single row something else than one beside others"
    return ""


def _of_gradients(
    form: Recording, run: Rows, weights: list[Tensor], dim: Dim, shapes: _Shapes, tail: Collection[str]
) -> str:
    """In words, the first leaf ahead of the ``tail`` whose gradients are others of one row than of it twice.

    Of a number they may be twice as much.
    """
    with torch.enable_grad():
        made = zip(form.calls[-1].args[0], run("a"), run("aa"), strict=True)
    for call, *both in ((c, *values) for c, *values in made if isinstance(c, Call) and c.name not in tail):
        rows = axes(call, 0, dim, shapes)
        one, two = (gradient_of([(t, rows)], weights, (0,)) for t in both)
        if not any(is_close(k * one, two, ALLOWED) for k in ((1,) if rows else (1, 2))):
            return f"the gradients of {call_and_place(call)} are others of a single row"
    return ""


def _is_other(call: Call, i: int, alone: Any, twice: Any, dim: Dim, shapes: _Shapes) -> bool:
    """Whether what one row gives is not what it gives ``twice``; a number may be mean or sum of both."""
    if not (isinstance(alone, Tensor) and isinstance(twice, Tensor)) or alone.is_nested:
        return False
    places = axes(call, i, dim, shapes)
    if is_number(twice) and not places:
        return not any(is_close(alone, k * twice, ROUNDED) for k in (1, 0.5))
    return any(_is_other_row(alone, twice, axis) for axis in places)


def _is_other_row(alone: Tensor, twice: Tensor, axis: int) -> bool:
    """Whether the first row along an axis is another, or data have left it in one of both alone."""
    has_one, has_two = (extent(t, axis) > 0 for t in (alone, twice))
    if not (has_one and has_two):
        return has_one is not has_two
    a, b = (t.select(axis, 0) for t in (alone, twice))
    return a.shape != b.shape or not is_close(a, b, ROUNDED)


def _fault(form: Recording, run: Rows, shapes: _Shapes, tail: Collection[str]) -> tuple[str, list[Any]]:
    """See :func:`fault_in_one_row`; of what ``run`` runs on a row, with the leaves that come of it."""
    seen: set[int] = set()
    other: list[Call] = []

    def look(call: Call, value: Any) -> None:
        seen.add(id(call))
        if call.name in tail:
            return
        formulas = shapes.get(id(call), ())
        if any(t.ndim != len(f) for t, f in zip(tensors(value), formulas, strict=False)):
            other.append(call)

    made: list[Any] = []
    try:
        pairs = zip(form.calls[-1].args[0], run("a", look), strict=True)
        made = [value for call, value in pairs if isinstance(call, Call)]
    except of_models() as error:  # any Python of the model, on rows it may not take
        failed = next((c for c in form.calls if id(c) not in seen), form.calls[-1])
        if not other and failed.name not in tail and _takes_two(run):
            return f"{call_and_place(failed)} does not take a single row: {first_line(error)}", made
    return f"{call_and_place(other[0])} drops the axis of a single row" if other else "", made


def _takes_two(run: Rows) -> bool:
    with contextlib.suppress(Exception):
        run("ab")
        return True
    return False
