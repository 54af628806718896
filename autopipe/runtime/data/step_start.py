"""What a rank does with a batch before a step's first action, so that it can be timed.

Doing it in a step is left to ``intake``, which it calls, and ``step_agreement``; timing it to ``measure``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...errors import AutopipeError
from ...stages import Section
from ..options import Options, Request
from .call_kinds import Kind, Kinds
from .intake import Intake
from .microbatch import AT_A_GLANCE, Batch, with_forms

if TYPE_CHECKING:
    from ...tracing import Capture

__all__ = ["beginning"]


def beginning(capture: Capture, n_microbatches: int) -> Callable[[], object]:
    """A call that takes the example batch in and looks at what ranks compare, as steps after the first do.

    A batch that cannot be cut into so many is only bound.
    """
    args, kwargs = capture.example
    try:
        intake = _intake(capture, n_microbatches)
        request = Request(args=args, kwargs=kwargs, grad=True)
        intake.take(request)
    except AutopipeError:
        return lambda: capture.bind(args, kwargs)
    parameters = tuple(capture.model.parameters())

    def begin() -> object:
        batch = intake.take(request).batch
        for column in batch.leaves.values():
            tuple(column)  # cut
        said = tuple(batch.sizes()), batch.signature(0), tuple([p.requires_grad for p in parameters])
        return said, batch.checksum(AT_A_GLANCE)

    return begin


def _intake(capture: Capture, n_microbatches: int) -> Intake:
    """What takes batches in where the model is one stage in one process."""
    options = Options(n_microbatches=n_microbatches)
    kinds = Kinds(capture, options, is_whole=bool(capture.variation.tail.ops))
    stage = Section("", 0, 0, tuple(op.name for op in capture.ops.inputs), (), is_last=True)
    forms = _CapturedForms(capture, kinds[0])
    intake = Intake(capture, options, kinds, forms, None, None, (stage,), capture.device)
    intake.follow((stage,), (stage,))
    return intake


class _CapturedForms:
    """The forms that a capture has, of which none is added."""

    def __init__(self, capture: Capture, kind: Kind) -> None:
        self._capture, self._kind, self._assumptions = capture, kind, capture.assumptions

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Kind, dict[str, Any]]:
        values = self._capture.values(args, kwargs)
        self._assumptions.begin()
        return self._kind, values

    def binds_alike(self) -> bool:
        is_same = not self._assumptions.changed()
        self._assumptions.begin()
        return is_same

    def meet(self, batch: Batch) -> Batch:
        return with_forms(batch, self._capture)

    def meet_form(self, kind: int, inputs: Mapping[str, Any]) -> int:
        return self._capture.form_of(inputs)

    def renew(self) -> None:
        pass

    def check_rows(self, batch: Batch, has_backward: bool) -> None:
        pass
