"""The last stage where a ``loss_fn`` takes the outputs of all microbatches at once.

What the loss makes of them is left to ``loss``; an end of the model that takes the whole batch to ``tail``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ...stages import Section, Stage
from ...torch_private import backward
from ..wire.boundary import Edge
from .backward import Root
from .loss import Loss
from .worker import Manner, StepInputs, Worker

__all__ = ["OF_BATCH", "LastWorker"]

OF_BATCH = "the loss of the whole batch"


class LastWorker(Worker):
    """Keeps what microbatches give while the loss gathers it, and hands each its gradient.

    The loss of all, and its backward, run within the forward of the last microbatch; the microbatches' own
    backwards then find their gradients.
    """

    def __init__(
        self, stage: Stage, section: Section, edges: Sequence[Edge], manner: Manner, loss: Loss
    ) -> None:
        super().__init__(stage, section, edges, manner)
        self._gathering = loss

    def begin(self, step: StepInputs) -> None:
        """Forget the last step and take up the next."""
        super().begin(step)
        n = step.batch.n_microbatches
        self._is_of_batch = False
        self._given: list[list[Any]] = [[] for _ in range(n)]
        self._heads: list[dict[int, Root]] = [{} for _ in range(n)]
        self._grads: list[dict[int, Tensor]] = [{} for _ in range(n)]

    def end(self) -> None:
        """Drop everything that belongs to a step, so that nothing holds a graph."""
        super().end()
        self._given, self._heads, self._grads = [], [], []

    @property
    def weights(self) -> Sequence[float | Tensor]:
        """What each of the ``losses`` weighs."""
        return (1.0,) if self._is_of_batch else super().weights

    def forward(self, m: int) -> None:
        """Run microbatch ``m``, and once all have run their loss, where it gathers them."""
        super().forward(m)
        if all(self._given):
            self._take_batch(m)

    def _keep_last(self, outputs: tuple[Any, ...], m: int) -> None:
        if self._is_of_batch:  # it runs again in backward
            self._heads[m] = self._roots_of(outputs)
            return
        if not self._step.want_loss or not self._gathering.gathers:
            super()._keep_last(outputs, m)
            return
        is_asked = self._gathering.is_asked  # then a loss may write to what it is given
        detached = [x.detach() if isinstance(x, Tensor) else x for x in outputs]
        self._given[m] = [x.clone() if is_asked and isinstance(x, Tensor) else x for x in detached]
        if self._step.grad:
            for given, output in zip(self._given[m], outputs, strict=True):
                if isinstance(output, Tensor) and self._may_have_gradient(output):
                    given.requires_grad_()
            self._heads[m] = {} if self._recompute else self._roots_of(outputs)
        if is_asked:
            super()._keep_last(outputs, m)
        else:
            self._keep_outputs(outputs, m)

    def _may_have_gradient(self, output: Tensor) -> bool:
        """Whether a gradient may come back for an output; one that is made again does not tell it yet."""
        is_continuous = output.is_floating_point() or output.is_complex()
        return is_continuous if self._recompute else output.requires_grad

    def _roots_of(self, outputs: Sequence[Any]) -> dict[int, Root]:
        tensors = enumerate(outputs)
        return {i: get_gradient_edge(x) for i, x in tensors if isinstance(x, Tensor) and x.requires_grad}

    def _take_batch(self, m: int) -> None:
        """The loss of the whole batch, and back to what microbatches gave."""
        step, parts = self._step, self._given
        self._given = [[] for _ in parts]
        with self._around_loss():
            loss = self._gathering.of_batch(parts)
        if loss is None:  # those of microbatches are the batch's
            self._heads = [{} for _ in parts]
            return
        self.losses, self._is_of_batch = [loss.detach()], True
        self._roots = [None] * len(parts)
        if self._probe is not None and not loss.isfinite():
            self._probe.append((m, self.stage.index, OF_BATCH))
        if step.grad:
            self.replicas.before_backward(False)
            backward([loss], step.seeds((1.0,), loss))
            self._grads = [
                {i: x.grad for i, x in enumerate(part) if isinstance(x, Tensor) and x.grad is not None}
                for part in parts
            ]

    def _collect(self, m: int) -> tuple[list[Root], list[Tensor]]:
        if not self._is_of_batch:
            return super()._collect(m)
        if self._recompute:
            self._run_again(m)
        heads, grads = self._heads[m], self._grads[m]
        self._heads[m], self._grads[m] = {}, {}
        places = [i for i in heads if i in grads]
        return [heads[i] for i in places], [grads[i] for i in places]
