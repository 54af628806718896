"""Inputs met at a step that no form of the model covers: recorded then, on every rank, under the same cut.

Recording is left to the capture. Every rank meets the same inputs at the same step, since all have the batch
or, under ``feed``, are given all of one that is new; that they made the same of them ``accord`` sees.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import InputError
from ..stages import renewed
from .data.microbatch import Batch, with_forms
from .reduce.precision import autocast_context

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["meet"]

_logger = logging.getLogger(__name__)

WRAPPED = "the stages were wrapped; call pipe(...) with such inputs on every rank before it makes the runtime"

_UNKNOWN = (
    "whether the model makes of all rows of a batch together what it makes of those of each microbatch is "
    "not known, since it cannot be recorded on so many: %s; where it does not, pass n_microbatches=1"
)


def meet(engine: Engine, batch: Batch) -> Batch:
    """The batch with the forms that it asks for, which the engine's stages have from now on.

    Raises :class:`InputError` for what cannot be recorded, or not any more.
    """
    capture = engine.capture
    batch = with_forms(
        batch, capture, functools.partial(_form_of, engine), functools.partial(_form_of_all, engine)
    )
    if max((*batch.forms, *batch.of_all), default=0) < engine.all_stages[0].n_forms(capture.model.training):
        return batch
    if engine.was_wrapped:
        raise InputError(f"{capture.ops.model}: inputs of this kind were met after {WRAPPED}")
    engine.renew(renewed(capture, engine.all_stages))
    return dataclasses.replace(batch, is_new=True)


def _form_of_all(engine: Engine, inputs: Mapping[str, Any]) -> int | None:
    """The number of the form that a whole batch asks for; None, with a warning, where none can be recorded.

    The model may be unable to take so many rows. Inputs of the same shapes are not tried again.
    """
    shapes = tuple(tuple(v.shape) for v in inputs.values() if isinstance(v, Tensor))
    try:
        is_tried = shapes in engine.unrecorded
        return engine.capture.form_of(inputs) if is_tried else _form_of(engine, inputs)
    except InputError as refusal:
        if not engine.unrecorded:
            _logger.warning(_UNKNOWN, refusal)
        engine.unrecorded.add(shapes)
        return None


def _form_of(engine: Engine, inputs: Mapping[str, Any]) -> int:
    """The number of the form that inputs ask for; where there is none, of one that is recorded now.

    Not tried where the model was made on the meta device.
    """
    try:
        return engine.capture.form_of(inputs)
    except InputError as refusal:
        if engine.frees and engine.capture.device.type == "meta":
            raise
        if engine.was_wrapped:
            raise InputError(f"{refusal}. It is not recorded anew after {WRAPPED}") from refusal
    words, peers = "recording the model on inputs of a new kind", engine.peers
    with (
        contextlib.nullcontext() if peers is None else peers.together(words, waits=False),
        autocast_context(engine.options.autocast, engine.device)(),
        engine.shapes(),
    ):
        return engine.capture.form_met(inputs)
