"""What ranks agree on before a step: that it is the same, of one batch, with messages of like shapes.

Carrying that between them is left to ``peers``, the books of shapes to ``boundary``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..data.microbatch import AT_A_GLANCE, LOOKED_AT, Batch
from ..options import is_due
from ..stage.worker import StepInputs
from ..wire.channel import Channel
from ..wire.peers import Peers

if TYPE_CHECKING:
    from ...tracing import Capture

__all__ = ["Accord"]


class Accord:
    """Makes every rank begin the same step, or every rank raise."""

    def __init__(self, capture: Capture, peers: Peers, channel: Channel, is_fed: bool) -> None:
        self._model, self._peers, self._channel, self._is_fed = capture.model, peers, channel, is_fed
        self._parameters = tuple(self._model.parameters())
        self._signatures: dict[tuple[Any, ...], int] = {}

    def begin(self, step: StepInputs, factor: float) -> tuple[float, bool]:
        """Agree on a step. Returns the seconds waited for another rank, and whether a closer look is due."""
        batch, training = step.batch, self._model.training
        position = self._peers.position
        position.step, position.index, position.words = position.step + 1, -1, "the start of a step"
        position.is_idle = False
        flags = tuple(p.requires_grad for p in self._parameters)
        words = (
            f"with {sum(batch.rows)} rows in {batch.n_microbatches} microbatches of "
            f"{_shapes(batch)}, training={training}, gradients={step.grad}, sync={step.syncs}, "
            f"inputs' gradients={sorted(step.tracked)}, times={factor:.12g}, "
            f"loss={step.want_loss}, outputs={step.outputs_on or None}, trained={sum(flags)} of {len(flags)}"
            + (f", forms {list(batch.forms)} of the model" if any(batch.forms) else "")
        )
        looks = is_due(position.step - 1)
        # what is on the device is looked at while that still warms up
        looks_at_batch = not self._is_fed and (batch.is_on_host or (looks and position.step <= 2))
        checksum = batch.checksum(LOOKED_AT if looks else AT_A_GLANCE) if looks_at_batch else 0
        waited_s = self._peers.agree(position.step, words, f"{words} {flags} {step.seed}", checksum)
        self._sign(batch, (step.grad, training, flags, step.tracked))
        return waited_s, looks

    def _sign(self, batch: Batch, mode: tuple[Any, ...]) -> None:
        """Number what decides the shapes on the wire: ranks meet the same in the same order."""
        known: dict[tuple[int, ...], int] = {}
        sizes = list(batch.sizes())
        for m, size in enumerate(sizes):
            if size not in known:
                key = (mode, batch.signature(m))
                known[size] = self._signatures.setdefault(key, len(self._signatures))
        self._channel.signatures = [known[size] for size in sizes]


def _shapes(batch: Batch) -> str:
    columns: dict[str, Sequence[Any]] = dict(batch.leaves)
    shapes = (
        f"{name} {v.dtype}{list(v.shape)}" if isinstance(v, Tensor) else f"{name}={v!r}"
        for name, v in ((name, column[0]) for name, column in columns.items())
    )
    return ", ".join(shapes)
