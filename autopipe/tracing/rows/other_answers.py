"""Whether a row comes out otherwise where its batch answers what a model asks of values, and not as it does.

A microbatch answers for itself. What two rows tried at capture answer together is left to
``batch_questions``: here the question is what one form makes of a row that asks for another, whatever data
lead to it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ...graph import Dim, batch_dim
from ..calls.call import Branch, Recording
from ..calls.describe import expression
from ..sizes.variation import Variation
from .by_count import copies, given_by, is_other

__all__ = ["answered_otherwise"]

_logger = logging.getLogger("autopipe")
_MOST_ROWS = 4
_Batch = Mapping[str, Tensor]
_Form = tuple[Recording, Variation]


@torch.no_grad()
def answered_otherwise(
    model: nn.Module,
    form: _Form,
    first: _Form,
    batches: Sequence[_Batch],
    asks_for: Callable[[Recording, _Batch], bool],
    device: torch.device,
    start: Callable[[], None],
) -> tuple[str | None, str | None]:
    """In words, what is asked of values where a ``form`` makes another of a row than the ``first`` does.

    Of rows that ask for the first, and of rows that ask for the form, None where there are none: the first
    few of ``batches``, each in copies of its own. ``asks_for`` tells whether a batch asks for a form;
    ``start`` sets mode and state.
    """
    dim = batch_dim(form[1].dims)
    if dim is None or dim.packed or device.type == "meta" or dim.name not in {d.name for d in first[1].dims}:
        return None, None
    asked = next(_asked_otherwise(form[0], first[0], dim), None)
    if asked is None:
        return None, None
    of_each: dict[int, str] = {}
    for batch in _of_rows(batches, dim, first[1]):
        place = next((i for i, f in enumerate((first, form)) if asks_for(f[0], batch)), None)
        if place is None or place in of_each:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made, known = (given_by(model, f[0], batch, device, start) for f in (form, first))
        except Exception as error:  # any Python of the model, on rows it may not take; or noise not known
            _logger.debug("rows could not be answered otherwise: %s", error)
            continue
        pairs = zip(made, known, strict=True)
        is_any = any(is_other(call, here, there, dim, form[1], 1.0) for (call, here), (_, there) in pairs)
        of_each[place] = (
            f"{asked.source} asks {expression(asked.read.args)} of all rows at once" if is_any else ""
        )
    return of_each.get(0), of_each.get(1)


def _asked_otherwise(form: Recording, first: Recording, dim: Dim) -> Iterator[Branch]:
    """What two forms ask of the values of rows and answer otherwise."""
    rows = {name for name, _ in dim.where}
    for one, other in zip(form.branches, first.branches, strict=False):
        is_of_rows = any(c.op == "placeholder" and c.target in rows for c in one.calls)
        if one.outcome != other.outcome and is_of_rows and not one.of_setting:
            yield one


def _of_rows(batches: Sequence[_Batch], dim: Dim, first: Variation) -> Iterator[_Batch]:
    """Batches of copies of one row, as many as the batch has, where the first form takes these sizes."""
    for batch in batches:
        sizes = {d.name: batch[d.where[0][0]].shape[d.where[0][1]] for d in first.dims}
        if batch[dim.where[0][0]].is_meta or not all(check.holds(sizes) for check in first.checks):
            continue
        n = sizes[dim.name]
        yield from (copies(batch, dim, row, n) for row in range(min(n, _MOST_ROWS)))
