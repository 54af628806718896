"""What takes in and gives back the batches of a model, for each kind of arguments that it was captured with.

Which kinds there are is left to the capture.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..options import Options
from .microbatch import Splitter
from .outputs import Outputs
from .rows import MixedRows
from .weights import Weigher

if TYPE_CHECKING:
    from ...tracing import Capture

__all__ = ["Kind", "Kinds"]


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """What cuts and weighs batches of one kind, tells whether their rows may be cut, and joins outputs."""

    number: int
    capture: Capture
    splitter: Splitter
    weigher: Weigher
    mixed: MixedRows
    outputs: Outputs


class Kinds:
    """By number, all kinds of calls that ``capture`` has, those too that it gets later."""

    def __init__(self, capture: Capture, options: Options, *, is_whole: bool) -> None:
        """``is_whole``: what mixes rows at the model's end gets the whole batch."""
        self._capture, self._options, self._is_whole = capture, options, is_whole
        self._made: list[Kind] = []

    def __getitem__(self, number: int) -> Kind:
        if number >= len(self._made):
            n = len(self._made)
            self._made += itertools.starmap(self._make, enumerate(self._capture.kinds[n:], n))
        return self._made[number]

    def __iter__(self) -> Iterator[Kind]:
        return (self[number] for number in range(len(self._capture.kinds)))

    def of(self, capture: Capture) -> Kind:
        """That of the calls which a capture is for."""
        return self[self._capture.kinds.index(capture)]

    def _make(self, number: int, capture: Capture) -> Kind:
        options, is_whole = self._options, self._is_whole
        reduction, weight, loss_fn = options.loss_reduction, options.loss_weight, options.loss_fn
        return Kind(
            number,
            capture,
            Splitter(capture, options.batch_dims),
            Weigher(
                capture,
                reduction,
                weight,
                loss_fn,
                is_whole=is_whole,
                is_replicated=options.has_replicas,
            ),
            MixedRows(capture, options.mixed_rows, is_whole),
            Outputs(capture),
        )
