"""Tensors of which several ranks have a copy, and whether this rank has written to its own in a step.

The gradients of shared parameters are summed by ``reduce.ties``. What is written to in each forward was seen
by the capture, and is in one stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...errors import StepError
from ...stages import Stage

__all__ = ["Copies"]


class Copies:
    """Buffers and parameters of this rank's stages that stages of other ranks hold too.

    A forward may write to one of them in some step alone, as a scale that is redrawn now and then: the other
    ranks would go on with what they have.
    """

    def __init__(self, own: Sequence[Stage], stages: Sequence[Stage]) -> None:
        elsewhere: dict[int, Stage] = {}
        here = {stage.rank for stage in own}
        for stage in stages:
            if stage.rank not in here:
                elsewhere.update((id(tensor), stage) for _, tensor in _tensors(stage))
        self._held = {
            id(tensor): (name, tensor, stage, elsewhere[id(tensor)])
            for stage in own
            for name, tensor in _tensors(stage)
            if id(tensor) in elsewhere and not tensor.is_inference()
        }.values()
        self._versions: list[int] = []

    def begin(self) -> None:
        """Note how they are before a step's first action."""
        self._versions = [tensor._version for _, tensor, _, _ in self._held]

    def check(self) -> None:
        """Raise :class:`StepError` where an action of this rank wrote to one of them."""
        for (name, tensor, stage, other), version in zip(self._held, self._versions, strict=True):
            if tensor._version != version:
                raise StepError(
                    f"stage {stage.index} wrote to {name} in this step, as it did not when it was captured, "
                    f"and stage {other.index} on rank {other.rank} has a copy of its own, which stays as it "
                    "was; capture with an example in which it is written to, or pin what writes to it and "
                    "what reads it to one stage, as in split(pin={'op': 0, …})"
                )


def _tensors(stage: Stage) -> list[tuple[str, Tensor]]:
    return [*stage.named_parameters(), *stage.named_buffers()]
