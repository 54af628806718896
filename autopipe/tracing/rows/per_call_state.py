"""What a training forward writes in its model as often as it is called: counts, averages, power iterations.

Cut into microbatches a batch is several calls, which leave such things otherwise than one does. That rows
depend on one another is left to ``mixing``, telling people to ``capture`` and ``runtime``.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...graph import batch_dim
from ..calls.call import Recording
from ..sizes.guards import broken
from ..sizes.rerun import buffers_written, replay
from ..sizes.variation import Variation
from ..state.example_data import close_to
from ..state.state import seed

__all__ = ["by_call"]

_logger = logging.getLogger("autopipe")


@torch.no_grad()
def by_call(
    model: nn.Module,
    form: Recording,
    given: Mapping[str, Tensor],
    variation: Variation,
    device: torch.device,
    start: Callable[[bool], None],
) -> tuple[str, ...]:
    """The buffers and numbers, by name, that two batches leave otherwise than one of all their rows does.

    Three runs of a training ``form``, where it writes to any at all; ``start`` sets mode and state. Nothing
    is found on the meta device, nor where the form is not right for twice the rows of ``given``, which
    ``variation`` tells.
    """
    dim = batch_dim(variation.dims)
    if dim is None or dim.packed or device.type == "meta":
        return ()
    # what a layer that stays whole keeps for its next call is written, too
    if not (form.keeps or buffers_written(model, [form])):
        return ()
    if not variation.takes_rows(2 * dim.example):
        return ()

    def left_by(*batches: Mapping[str, Tensor]) -> dict[str, Any]:
        start(True)
        seed(device)
        for batch in batches:
            seen = replay(model, form, batch, device)
            if any(broken(g, seen.numbers) for g in form.guards if id(g) in variation.unsure):
                raise _Otherwise
        return dict(_held(model))

    other = dict(given)
    other.update({name: given[name].detach().flip(axis) for name, axis in dim.where})
    both = dict(given)
    both.update({name: torch.cat([given[name].detach(), other[name]], axis) for name, axis in dim.where})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            apart, at_once = left_by(given, other), left_by(both)
    except _Otherwise:
        return ()
    except Exception as error:  # any Python of the model, on rows it may not take
        _logger.debug("what a forward writes could not be looked at: %s", error)
        return ()
    return tuple(name for name, value in at_once.items() if not close_to(value, apart.get(name)))


class _Otherwise(Exception):
    """The model goes another way on these rows."""


def _held(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """A copy of every buffer, and the numbers and tensors in attributes."""
    yield from ((name, buffer.detach().clone()) for name, buffer in model.named_buffers())
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, (int, float, Tensor)) and name != "training":
                shown = f"{path}.{name}".lstrip(".")
                yield shown, value.detach().clone() if isinstance(value, Tensor) else value
