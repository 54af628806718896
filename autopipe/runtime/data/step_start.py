"""What a rank does with a batch before a step's first action, so that it can be timed.

Doing it in a step is left to ``intake`` and ``accord``, whose parts it calls; timing it to ``measure``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...errors import AutopipeError
from .microbatch import AT_A_GLANCE, Splitter, with_forms
from .weights import Weigher

if TYPE_CHECKING:
    from ...tracing import Capture

__all__ = ["beginning"]


def beginning(capture: Capture, n_microbatches: int) -> Callable[[], object]:
    """A call that binds the example batch, cuts it, weighs its microbatches and looks at what ranks compare.

    A batch that cannot be cut into so many is only bound.
    """
    args, kwargs = capture.example
    splitter, weigher = Splitter(capture), Weigher(capture, None, None, None)
    parameters = tuple(capture.model.parameters())

    def begin() -> object:
        bound = capture.bind(args, kwargs)
        batch = with_forms(splitter.split(bound, None, n_microbatches), capture)
        weigher.weigh(batch, args, kwargs, bound)
        for column in batch.leaves.values():
            tuple(column)  # cut
        said = tuple(batch.sizes()), batch.signature(0), tuple([p.requires_grad for p in parameters])
        return said, batch.checksum(AT_A_GLANCE)

    try:
        begin()
    except AutopipeError:
        return lambda: capture.bind(args, kwargs)
    return begin
