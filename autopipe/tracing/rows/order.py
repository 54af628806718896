"""Whether a form gives another result for a batch in another order: rows may have parts by their places.

As anchors, positives and negatives have that lie one after another along a batch, which two rows alone cannot
show. Rows in one another's places are left to ``mixing``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...graph import Dim
from ..calls.call import Call, Recording
from ..calls.describe import call_and_place
from ..sizes.rerun import replay
from ..state.state import seed
from .results import EQUAL, ROUNDED, axes, is_close, is_number

__all__ = ["by_order"]


@torch.no_grad()
def by_order(
    model: nn.Module,
    form: Recording,
    given: Mapping[str, Tensor],
    dim: Dim,
    shapes: Mapping[int, Any],
    device: torch.device,
    start: Callable[[], None],
) -> str:
    """In words, the first output that is not as it was in another order, for rows turned by one place.

    Two runs of a form that draws nothing; ``start`` sets mode and state.
    """
    if any(call.is_random for call in form.calls):
        return ""
    turned = dict(given)
    for name, axis in dim.where:
        turned[name] = given[name].detach().roll(1, axis).requires_grad_(given[name].requires_grad)
    before, after = (_run(model, form, rows, device, start) for rows in (given, turned))
    for place, call in enumerate(form.calls[-1].args[0]):
        if isinstance(call, Call) and _is_other(call, before[place], after[place], dim, shapes):
            return f"{call_and_place(call)} hangs on the order of the rows"
    return ""


def _run(
    model: nn.Module,
    form: Recording,
    rows: Mapping[str, Tensor],
    device: torch.device,
    start: Callable[[], None],
) -> list[Any]:
    start()
    seed(device)
    return list(replay(model, form, rows, device).result)


def _is_other(call: Call, before: Any, after: Any, dim: Dim, shapes: Mapping[int, Any]) -> bool:
    if not isinstance(before, Tensor):
        return False
    places = axes(call, 0, dim, shapes)
    turned = before.roll([1] * len(places), places) if places else before
    return not is_close(turned, after, EQUAL if is_number(before) else ROUNDED)
