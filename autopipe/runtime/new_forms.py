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

__all__ = ["NewForms"]

_logger = logging.getLogger(__name__)

WRAPPED = "the stages were wrapped; call pipe(...) with such inputs on every rank before it makes the runtime"

_UNKNOWN = (
    "whether the model makes of all rows of a batch together what it makes of those of each microbatch is "
    "not known, since it cannot be recorded on so many: %s; where it does not, pass n_microbatches=1"
)


class NewForms:
    """What the calls of an engine ask of its model: the :class:`Forms` of where batches come in."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._unrecorded: set[tuple[tuple[int, ...], ...]] = set()
        """Shapes of whole batches, by input, that the model could not be recorded on."""

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Kind, dict[str, Any]]:
        """The kind of a call and its inputs by name; where it is of none, of one that is recorded now.

        A changed model (a layer thawed) is recorded again, whatever its values. In the surroundings that
        stages run in, since the model's own code may ask for the autocast there. Raises :class:`InputError`
        for what does not fit what was captured and cannot be recorded, or not any more.
        """
        engine = self._engine
        capture, bound = engine.capture.kind_of(args, kwargs)
        with self._autocast():
            try:
                values = self._values(capture, args, kwargs, bound)
            except InputError as error:
                if capture.is_new(error, args, kwargs):
                    self._check_recordable(error)
                    with self._recording():
                        capture, values = engine.capture.kind_met(args, kwargs)
                elif engine.frees:
                    with engine.shapes():
                        values = capture.values(args, kwargs, bound)
                else:
                    raise
        capture.assumptions.begin()
        return engine.kinds.of(capture), values

    def binds_alike(self) -> bool:
        """Whether a call like the one before is bound as that was, since the model is as it was captured."""
        capture = self._engine.capture
        if capture.device.type != "meta":
            with self._autocast():
                if capture.assumptions.changed():
                    return False
        capture.assumptions.begin()
        return True

    def _values(
        self,
        capture: Capture,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        bound: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """A call's inputs by name; recording a changed model again goes by the shapes of others' weights."""
        try:
            return capture.values(args, kwargs, bound)
        except StaleError:
            with self._engine.shapes():
                return capture.values(args, kwargs, bound)

    def meet(self, batch: Batch) -> Batch:
        """The batch with the forms that it asks for; where stages lack some, they are to be renewed.

        Raises :class:`InputError` for what cannot be recorded, or not any more.
        """
        engine = self._engine
        capture = engine.kinds[batch.kind].capture
        of, of_all = functools.partial(self._form_of, capture), functools.partial(self._form_of_all, capture)
        batch = with_forms(batch, capture, of, of_all)
        n_forms = engine.all_stages[0].n_forms(capture.model.training)
        if max((*batch.forms, *batch.of_all), default=0) < n_forms:
            return batch
        if engine.was_wrapped:
            raise InputError(f"{capture.ops.model}: inputs of this kind were met after {WRAPPED}")
        return dataclasses.replace(batch, is_new=True)

    def meet_form(self, kind: int, inputs: Mapping[str, Any]) -> int:
        """The number of the form that inputs of a kind ask for; where there is none, of one recorded now."""
        return self._form_of(self._engine.kinds[kind].capture, inputs)

    def renew(self) -> None:
        """Have stages with all forms that there are."""
        self._engine.renew(renewed(self._engine.capture, self._engine.all_stages))

    def check_rows(self, batch: Batch, has_backward: bool) -> None:
        """Raise :class:`InputError` where microbatches are not what their batch is."""
        engine = self._engine
        if batch.n_microbatches < 2:
            return
        mixed = engine.kinds[batch.kind].mixed
        mixed.check_tables()
        if engine.is_whole or not engine.options.batch_dims:
            # a rank alone would have the others wait, and what wraps stages would talk to other ranks
            may_ask = engine.peers is None and not engine.was_wrapped
            running = None if engine.was_wrapped else self._recording
            mixed.check(batch, has_backward=has_backward, may_ask=may_ask, running=running)

    def _form_of_all(self, capture: Capture, inputs: Mapping[str, Any]) -> int | None:
        """The number of the form that a whole batch asks for; None, with a warning, where it has none.

        The model may be unable to take so many rows. Inputs of the same shapes are not tried again.
        """
        shapes = tuple(tuple(v.shape) for v in inputs.values() if isinstance(v, Tensor))
        try:
            is_tried = shapes in self._unrecorded
            return capture.form_of(inputs) if is_tried else self._form_of(capture, inputs)
        except InputError as refusal:
            if not self._unrecorded:
                _logger.warning(_UNKNOWN, refusal)
            self._unrecorded.add(shapes)
            return None

    def _form_of(self, capture: Capture, inputs: Mapping[str, Any]) -> int:
        """The number of the form that inputs ask for; where there is none, of one that is recorded now."""
        try:
            return capture.form_of(inputs)
        except InputError as refusal:
            self._check_recordable(refusal)
        with self._recording():
            number = capture.form_met(inputs)
        self._engine.note_form(capture, inputs)
        return number

    def _check_recordable(self, refusal: InputError) -> None:
        """Raise what a call was refused with where it is not to be recorded.

        That is once stages are wrapped, and where the model was made on the meta device.
        """
        engine = self._engine
        if engine.frees and engine.capture.device.type == "meta":
            raise refusal
        if engine.was_wrapped:
            raise InputError(f"{refusal}. It is not recorded anew after {WRAPPED}") from refusal

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        """Within it the model is recorded as stages run it; ranks that wait for this one hear of it."""
        words, peers = "recording the model on inputs of a new kind", self._engine.peers
        with (
            contextlib.nullcontext() if peers is None else peers.together(words, waits=False),
            self._autocast(),
            self._engine.shapes(),
        ):
            yield

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast that stages run in."""
        return autocast_context(self._engine.options.autocast, self._engine.device)()
