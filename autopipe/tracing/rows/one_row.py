"""Whether a form is right for a batch of one row: ``squeeze()`` drops its axis, and batch norm takes no such.

Keeping more rows to a microbatch is left to ``runtime``, planning for it to ``api``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch

from ...graph import batch_dim
from ..calls.call import Call, Recording
from ..calls.describe import call_and_place
from ..calls.functions import tensors
from ..runs.session import Session
from ..sizes.trials import first_line
from ..sizes.variation import Variation
from .alike_layers import AlikeLayers
from .mixing import rows_of
from .results import Rows
from .varied_data import layer_kind

__all__ = ["fault_in_one_row"]


@torch.no_grad()
def fault_in_one_row(
    session: Session,
    form: Recording,
    given: Mapping[str, torch.Tensor],
    variation: Variation,
    tail: Collection[str],
    training: bool,
) -> str:
    """In words, the first call ahead of the ``tail`` that one row is not to one as more are; or "".

    It has other axes then, or fails, as it does not with two. A form that asks for more rows has no fault. Of
    torch's layers of one kind that were seen to do the same, one runs for all where that goes well; the
    model's own code may do otherwise for a single row, whatever it did for more.
    """
    dim = batch_dim(variation.dims)
    if dim is None or dim.packed or dim.example < 2 or not variation.takes_rows(1):
        return ""
    run = partial(
        rows_of,
        *(session.model, form, given, dim, session.device, partial(session.start, training)),
        alone=True,
    )
    alike: AlikeLayers | None = session.code.alike.get(form.calls[-1])
    if alike is not None and alike.is_worth_it:
        own = {c.target for c in form.calls if c.op == "call_module" and session.code.is_own(c)}
        alike = alike.of_kind(lambda path: path if path in own else layer_kind(session.model, path))
        if alike.is_worth_it and not _fault(form, run(alike=alike), variation.shapes, tail):
            return ""
    return _fault(form, run(), variation.shapes, tail)


def _fault(form: Recording, run: Rows, shapes: Mapping[int, Any], tail: Collection[str]) -> str:
    """See :func:`fault_in_one_row`; of what ``run`` runs on a row."""
    seen: set[int] = set()
    other: list[Call] = []

    def look(call: Call, value: Any) -> None:
        seen.add(id(call))
        if call.name in tail:
            return
        formulas = shapes.get(id(call), ())
        if any(t.ndim != len(f) for t, f in zip(tensors(value), formulas, strict=False)):
            other.append(call)

    try:
        run("a", look)
    except Exception as error:  # any Python of the model, on rows it may not take
        failed = next((c for c in form.calls if id(c) not in seen), form.calls[-1])
        if not other and failed.name not in tail and _takes_two(run):
            return f"{call_and_place(failed)} does not take a single row: {first_line(error)}"
    return f"{call_and_place(other[0])} drops the axis of a single row" if other else ""


def _takes_two(run: Rows) -> bool:
    with contextlib.suppress(Exception):
        run("ab")
        return True
    return False
