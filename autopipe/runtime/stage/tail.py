"""The tail of a model that mixes rows: run once a step, on all microbatches together.

Which ops those are is told by the capture; what runs before them, on microbatches, is left to ``worker``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import InputError
from ...graph import batch_dim
from ...torch_private import backward
from ...tracing.rows.tail import join, row_axes
from ..wire.boundary import Edge
from .worker import StepInputs, Worker

if TYPE_CHECKING:
    from ...tracing import Capture

__all__ = ["TailWorker"]


class TailWorker(Worker):
    """Joins what the microbatches give, and runs the tail, the loss and their backward on it at once.

    It begins when the last value of the last microbatch has come, within the forward that gives it; the
    microbatches' own backwards then find their gradients. Its step has one microbatch.
    """

    def join_by(self, kinds: Sequence[Capture]) -> None:
        """Where rows lie in what comes, by the shapes and blocks that each kind of calls has."""
        names = [name for edge in self.edges_in for name in edge.names]
        self._axes_of = [
            {n: row_axes(kind.ops, n) for n in names if n in kind.ops.by_name and batch_dim(kind.ops.dims)}
            for kind in kinds
        ]
        self._blocks_of = [frozenset(kind.variation.tail.blocks) for kind in kinds]

    def begin(self, step: StepInputs) -> None:
        """Take up a step on microbatches as one on their batch."""
        whole = dataclasses.replace(step, batch=step.batch.as_one(self.stage._device), weights=(1.0,))
        super().begin(whole)
        self._axes, self._blocks = self._axes_of[step.batch.kind], self._blocks_of[step.batch.kind]
        self._rows = step.batch.rows
        self._pieces: dict[tuple[Edge, int], Sequence[Any]] = {}

    def end(self) -> None:
        """Drop everything that belongs to a step."""
        super().end()
        self._pieces = {}

    def accept(self, edge: Edge, m: int, values: Sequence[Any]) -> None:
        """Keep what microbatch ``m`` gives; with the last of all, run."""
        self._pieces[edge, m] = values
        if len(self._pieces) < len(self.edges_in) * len(self._rows):
            return
        for edge in self.edges_in:
            columns = zip(*(self._pieces[edge, m] for m in range(len(self._rows))), strict=True)
            joined = [self._join(n, list(c)) for n, c in zip(edge.names, columns, strict=True)]
            super().accept(edge, 0, joined)
        self._pieces = {}
        self.forward(0)
        if self._step.grad:
            self._turn_round()

    def _join(self, name: str, parts: list[Any]) -> Any:
        if any((part is None) is not (parts[0] is None) for part in parts):
            raise InputError(
                f"{name} is there in some microbatches and not in others, since the model goes another way "
                "by their values; pass n_microbatches=1 for such a batch"
            )
        return join(parts, self._axes.get(name, ()), self._rows if name in self._blocks else ())

    def _turn_round(self) -> None:
        """Backward to the pieces that were joined, which gather their gradients."""
        loss, self._roots[0] = self._roots[0], None
        if loss is not None:
            self.replicas.before_backward(False)
            with self._draws(0):
                backward([loss], self._step.seeds(self._step.weights, loss))
        self._values[0] = []
        for edge in self.edges_in:
            for m in range(len(self._rows)):
                edge.harvest(m)

    def reduce(self) -> None:
        """Nothing: the worker of what is before the tail reduces the gradients of the whole stage."""
