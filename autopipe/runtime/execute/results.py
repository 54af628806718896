"""What a step gives back: the loss of the whole batch on every rank, its outputs on those that want them.

Joining microbatches is left to ``outputs``; computing them to ``worker``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..data.call_kinds import Kinds
from ..data.outputs import share, weighted
from ..stage.worker import StepInputs, Worker
from ..step_result import StepResult
from ..wire.peers import Peers
from ..wire.plain_values import dtype_of, name_of

__all__ = ["Results"]


class Results:
    """Makes the results of steps; ``source`` is the pipeline rank that has them first."""

    def __init__(
        self,
        kinds: Kinds,
        peers: Peers | None,
        source: int,
        device: torch.device,
    ) -> None:
        self._kinds, self._peers = kinds, peers
        self._source, self._device = source, device
        self._dtype: torch.dtype | None = None
        self._is_dtype_shared = False

    def of(self, step: StepInputs, last: Worker | None) -> tuple[StepResult, Tensor | None]:
        """Of the step under way, with its loss in fp64; ``last`` is the worker at the end if it is here."""
        leaves = total = None
        kind = self._kinds[step.batch.kind]
        if last is not None and step.want_loss:
            total = weighted(last.losses, last.weights).to(self._device)
            self._dtype = self._dtype or next(x.dtype for x in last.losses if x is not None)
        if last is not None and step.outputs_on:
            batch = last.step.batch
            weights = kind.weigher.in_outputs(batch, last.step.weights)
            leaves = kind.outputs.join([o or [] for o in last.outputs], batch, weights)
        if self._peers is not None:
            leaves, total = self._share(self._peers, step, leaves, total)
        joined = None if leaves is None else kind.capture.assemble(leaves)
        loss = torch.full((), math.nan, device="cpu") if total is None else total.to(self._dtype)
        return StepResult(loss, joined), total

    def _share(
        self,
        peers: Peers,
        step: StepInputs,
        leaves: list[Any] | None,
        total: Tensor | None,
    ) -> tuple[list[Any] | None, Tensor | None]:
        """Outputs and loss on the ranks that are to have them."""
        peers.position.words = "sharing the loss"
        if step.want_loss:
            if total is None:
                total = torch.zeros((), device=self._device, dtype=torch.float64)
            total = peers.broadcast(total, self._source)
            if not self._is_dtype_shared:
                mine = None if self._dtype is None else name_of(self._dtype)
                self._dtype, self._is_dtype_shared = dtype_of(peers.share(mine or "", self._source)), True
        if step.outputs_on == "all":
            leaves = share(leaves, peers, self._source, self._device)
        return leaves, total
