"""What a rank does with a batch before a step's first action, so that it can be timed.

Doing it in a step is left to ``intake``, which it calls, and ``step_agreement``; timing it to ``measure``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...errors import AutopipeError
from ...stages import Section
from ..options import Options, Request
from .call_kinds import Kind, Kinds
from .intake import Intake
from .microbatch import AT_A_GLANCE, with_forms

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
    assumptions = capture.assumptions

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Kind, dict[str, Any]]:
        values = capture.values(args, kwargs)
        assumptions.begin()
        return kinds[0], values

    def binds_alike() -> bool:
        is_same = not assumptions.changed()
        assumptions.begin()
        return is_same

    meet = functools.partial(with_forms, capture=capture)
    intake = Intake(
        capture, options, kinds, None, None, (stage,), capture.device, bind, binds_alike, meet,
        meet_form=lambda kind, inputs: capture.form_of(inputs),
        renew=lambda: None, check_rows=lambda batch, has_backward: None,
    )  # fmt: skip
    intake.follow((stage,), (stage,))
    return intake
