"""What ranks agree on before a step: that it is the same, of one batch, with messages of like shapes.

Carrying that between them is left to ``peers``, the books of shapes to ``boundary``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...torch_private import UnseenByFunctions
from ..data.microbatch import AT_A_GLANCE, LOOKED_AT, Batch
from ..options import is_due
from ..stage.worker import StepInputs
from ..wire.channel import Channel
from ..wire.peers import Peers

if TYPE_CHECKING:
    from ...tracing import Capture

__all__ = ["Accord"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Said:
    """What ranks say of a step beside its number, seed and batch, and the signatures of its microbatches.

    ``key`` is all that it follows from.
    """

    key: tuple[Any, ...] = ()
    words: str = ""
    all_words: str = ""
    signatures: Sequence[int] = ()


class Accord:
    """Makes every rank begin the same step, or every rank raise."""

    def __init__(self, capture: Capture, peers: Peers, channel: Channel, is_fed: bool) -> None:
        self._model, self._peers, self._channel, self._is_fed = capture.model, peers, channel, is_fed
        self._parameters = tuple(self._model.parameters())
        self._signatures: dict[tuple[Any, ...], int] = {}
        self._said = _Said()

    def begin(self, step: StepInputs, factor: float) -> tuple[float, bool]:
        """Agree on a step. Returns the seconds waited for another rank, and whether a closer look is due."""
        batch, position = step.batch, self._peers.position
        position.step, position.index, position.words = position.step + 1, -1, "the start of a step"
        position.is_idle = False
        said = self._say(step, factor)
        looks = is_due(position.step - 1)
        # what is on the device is looked at while that still warms up
        looks_at_batch = not self._is_fed and (batch.is_on_host or (looks and position.step <= 2))
        checksum = batch.checksum(LOOKED_AT if looks else AT_A_GLANCE) if looks_at_batch else 0
        waited_s = self._peers.agree(position.step, said.words, f"{said.all_words} {step.seed}", checksum)
        self._channel.signatures = said.signatures
        return waited_s, looks

    def _say(self, step: StepInputs, factor: float) -> _Said:
        """What is to be said of a step; made anew where it is not what was said of the last one."""
        batch, training = step.batch, self._model.training
        with UnseenByFunctions():  # other ranks' weights would each answer at length
            flags = tuple([p.requires_grad for p in self._parameters])
        mode = step.grad, training, flags, step.tracked
        sizes = tuple(batch.sizes())
        asked = step.syncs, factor, step.want_loss, step.outputs_on
        key = mode, asked, sizes, batch.forms, batch.signature(0)
        if key == self._said.key:
            return self._said
        words = (
            f"with {sum(batch.rows)} rows in {batch.n_microbatches} microbatches of "
            f"{_shapes(batch)}, training={training}, gradients={step.grad}, sync={step.syncs}, "
            f"inputs' gradients={sorted(step.tracked)}, times={factor:.12g}, "
            f"loss={step.want_loss}, outputs={step.outputs_on or None}, trained={sum(flags)} of {len(flags)}"
            + (f", forms {list(batch.forms)} of the model" if any(batch.forms) else "")
        )
        self._said = _Said(key, words, f"{words} {flags}", self._sign(batch, sizes, mode))
        return self._said

    def _sign(self, batch: Batch, sizes: Sequence[tuple[int, ...]], mode: tuple[Any, ...]) -> list[int]:
        """Numbers of what decides the shapes on the wire: ranks meet the same in the same order."""
        known: dict[tuple[int, ...], int] = {}
        for m, size in enumerate(sizes):
            if size not in known:
                key = (mode, batch.signature(m))
                known[size] = self._signatures.setdefault(key, len(self._signatures))
        return [known[size] for size in sizes]


def _shapes(batch: Batch) -> str:
    columns: dict[str, Sequence[Any]] = dict(batch.leaves)
    shapes = (
        f"{name} {v.dtype}{list(v.shape)}" if isinstance(v, Tensor) else f"{name}={v!r}"
        for name, v in ((name, column[0]) for name, column in columns.items())
    )
    return ", ".join(shapes)
