"""Whether a row differs where a model asks how many rows there are, and goes by it.

A microbatch has fewer rows than its batch, and answers for itself. Whether the rows of one form mix is left
to ``mixing``.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...graph import Dim, batch_dim
from ..calls.call import Call, Recording
from ..sizes.rerun import replay
from ..sizes.variation import Variation
from ..state.state import seed
from .noise import EvenNoise
from .results import ROUNDED, axes, is_close, is_number

__all__ = ["asked_how_many", "copies", "given_by", "is_other"]

_logger = logging.getLogger("autopipe")
_MOST_ROWS = 8
_Form = tuple[Recording, Variation]


@torch.no_grad()
def asked_how_many(
    model: nn.Module,
    form: _Form,
    first: _Form,
    given: Mapping[str, Tensor],
    device: torch.device,
    start: Callable[[], None],
) -> str:
    """In words, what is asked of the number of rows and makes of a row another than the ``first`` form does.

    Nothing where the first form takes as many rows, or takes these sizes with no number of them. Each form is
    run on as many copies of one row as it takes, with noise that is one number: ``given`` are inputs that
    ``form`` takes. ``start`` sets mode and state.
    """
    known = first[1]
    dim, of_first = batch_dim(form[1].dims), batch_dim(known.dims)
    if dim is None or of_first is None or dim.packed or device.type == "meta":
        return ""
    sizes = {d.name: d.example for d in form[1].dims}
    asked = next((c for c in known.checks if dim.name in c.symbols and not c.holds(sizes)), None)
    numbers = dict.fromkeys((of_first.example, *range(1, _MOST_ROWS + 1)))
    n = next((n for n in numbers if _takes(known, {**sizes, dim.name: n})), None)
    if asked is None or n is None:
        return ""

    def made(of: _Form, row: int, n_rows: int) -> list[tuple[Call, Any]]:
        return given_by(model, of[0], copies(given, dim, row, n_rows), device, start)

    per_row = n / dim.example if known.mixing.sums else 1.0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pairs = [
                (call, here, there)
                for row in (0, -1)
                for (call, here), (_, there) in zip(
                    made(form, row, dim.example), made(first, row, n), strict=True
                )
            ]
    except Exception as error:  # any Python of the model, on rows it may not take; or noise that is not known
        _logger.debug("rows could not be counted otherwise: %s", error)
        return ""
    is_any = any(is_other(c, here, there, dim, form[1], per_row) for c, here, there in pairs)
    return f"{asked.source} asks how many rows there are ({asked})" if is_any else ""


def _takes(variation: Variation, sizes: Mapping[str, int]) -> bool:
    return all(check.holds(sizes) for check in variation.checks)


def given_by(
    model: nn.Module,
    form: Recording,
    batch: Mapping[str, Tensor],
    device: torch.device,
    start: Callable[[], None],
) -> list[tuple[Call, Any]]:
    """What a form gives for a batch, each with the call that makes it, with noise that is one number."""
    start()
    seed(device)
    noise = EvenNoise(device) if any(c.is_random for c in form.calls) else contextlib.nullcontext()
    with noise:
        result = replay(model, form, batch, device).result
    return [(c, v) for c, v in zip(form.calls[-1].args[0], result, strict=True) if isinstance(c, Call)]


def copies(given: Mapping[str, Tensor], dim: Dim, row: int, n_rows: int) -> dict[str, Tensor]:
    """The tensors with so many copies of one of their rows."""
    out = dict(given)
    for name, axis in dim.where:
        out[name] = torch.stack([given[name].select(axis, row)] * n_rows, axis)
    return out


def is_other(call: Call, here: Any, there: Any, dim: Dim, variation: Variation, per_row: float) -> bool:
    """Whether a row, or a number made of rows that are all alike, is not the same in two forms."""
    if not (isinstance(here, Tensor) and isinstance(there, Tensor)):
        return False
    if is_number(here) and is_number(there):
        return not is_close(here * per_row, there, ROUNDED)
    rows = axes(call, 0, dim, variation.shapes)
    return any(a >= there.ndim or not _is_same(here.select(a, 0), there.select(a, 0)) for a in rows)


def _is_same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and is_close(x, y, ROUNDED)
