"""Calls met at a step that no form of the model covers: recorded then, on every rank, under the same cut.

Recording is left to the capture. Every rank meets the same inputs at the same step, since all have the batch
or, under ``feed``, are given all of one that is new; that they made the same of them ``step_agreement`` sees.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import InputError, StaleError
from ..stages import renewed
from .data.call_kinds import Kind
from .data.microbatch import Batch, with_forms
from .reduce.precision import autocast_context

if TYPE_CHECKING:
    from ..tracing import Capture
    from .engine import Engine

__all__ = ["bind", "meet", "meet_form", "renew"]

_logger = logging.getLogger(__name__)

WRAPPED = "the stages were wrapped; call pipe(...) with such inputs on every rank before it makes the runtime"

_UNKNOWN = (
    "whether the model makes of all rows of a batch together what it makes of those of each microbatch is "
    "not known, since it cannot be recorded on so many: %s; where it does not, pass n_microbatches=1"
)


def bind(engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Kind, dict[str, Any]]:
    """The kind of a call and its inputs by name; where it is of none, of one that is recorded now.

    A changed model (a layer thawed) is recorded again, whatever its values. In the surroundings that stages
    run in, since the model's own code may ask for the autocast there. Raises :class:`InputError` for what
    does not fit what was captured and cannot be recorded, or not any more.
    """
    capture, bound = engine.capture.kind_of(args, kwargs)
    with autocast_context(engine.options.autocast, engine.device)():
        try:
            values = _values(engine, capture, args, kwargs, bound)
        except InputError as error:
            if capture.is_new(error, args, kwargs):
                _check_recordable(engine, error)
                with _recording(engine):
                    capture, values = engine.capture.kind_met(args, kwargs)
            elif engine.frees:
                with engine.shapes():
                    values = capture.values(args, kwargs, bound)
            else:
                raise
    capture.assumptions.begin()
    return engine.kinds.of(capture), values


def _values(
    engine: Engine,
    capture: Capture,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    bound: dict[str, Any] | None,
) -> dict[str, Any]:
    """A call's inputs by name; recording a changed model again goes by the shapes of others' weights."""
    try:
        return capture.values(args, kwargs, bound)
    except StaleError:
        with engine.shapes():
            return capture.values(args, kwargs, bound)


def meet(engine: Engine, batch: Batch) -> Batch:
    """The batch with the forms that it asks for; where the engine's stages lack some, they are to be renewed.

    Raises :class:`InputError` for what cannot be recorded, or not any more.
    """
    capture = engine.kinds[batch.kind].capture
    of, of_all = (
        functools.partial(_form_of, engine, capture),
        functools.partial(_form_of_all, engine, capture),
    )
    batch = with_forms(batch, capture, of, of_all)
    if max((*batch.forms, *batch.of_all), default=0) < engine.all_stages[0].n_forms(capture.model.training):
        return batch
    if engine.was_wrapped:
        raise InputError(f"{capture.ops.model}: inputs of this kind were met after {WRAPPED}")
    return dataclasses.replace(batch, is_new=True)


def meet_form(engine: Engine, kind: int, inputs: Mapping[str, Any]) -> int:
    """The number of the form that inputs of a kind ask for; where there is none, of one recorded now."""
    return _form_of(engine, engine.kinds[kind].capture, inputs)


def renew(engine: Engine) -> None:
    """Have stages with all forms that there are."""
    engine.renew(renewed(engine.capture, engine.all_stages))


def _form_of_all(engine: Engine, capture: Capture, inputs: Mapping[str, Any]) -> int | None:
    """The number of the form that a whole batch asks for; None, with a warning, where none can be recorded.

    The model may be unable to take so many rows. Inputs of the same shapes are not tried again.
    """
    shapes = tuple(tuple(v.shape) for v in inputs.values() if isinstance(v, Tensor))
    try:
        is_tried = shapes in engine.unrecorded
        return capture.form_of(inputs) if is_tried else _form_of(engine, capture, inputs)
    except InputError as refusal:
        if not engine.unrecorded:
            _logger.warning(_UNKNOWN, refusal)
        engine.unrecorded.add(shapes)
        return None


def _form_of(engine: Engine, capture: Capture, inputs: Mapping[str, Any]) -> int:
    """The number of the form that inputs ask for; where there is none, of one that is recorded now."""
    try:
        return capture.form_of(inputs)
    except InputError as refusal:
        _check_recordable(engine, refusal)
    with _recording(engine):
        number = capture.form_met(inputs)
    engine.note_form(capture, inputs)
    return number


def _check_recordable(engine: Engine, refusal: InputError) -> None:
    """Raise what a call was refused with where it is not to be recorded.

    That is once stages are wrapped, and where the model was made on the meta device.
    """
    if engine.frees and engine.capture.device.type == "meta":
        raise refusal
    if engine.was_wrapped:
        raise InputError(f"{refusal}. It is not recorded anew after {WRAPPED}") from refusal


@contextlib.contextmanager
def _recording(engine: Engine) -> Iterator[None]:
    """Within it the model is recorded as stages run it; ranks that wait for this one hear of it."""
    words, peers = "recording the model on inputs of a new kind", engine.peers
    with (
        contextlib.nullcontext() if peers is None else peers.together(words, waits=False),
        autocast_context(engine.options.autocast, engine.device)(),
        engine.shapes(),
    ):
        yield
