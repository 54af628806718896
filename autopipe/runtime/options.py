"""What a runtime is told to do, and what a step gives back.

Both are documented where users meet them, in ``runtime``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..schedule import Schedule
from .data.weights import LossWeight
from .reduce.precision import Autocast

__all__ = ["Options", "StepResult", "Where", "is_due"]

Where = Literal["last", "all"]


def is_due(n_done: int) -> bool:
    """Whether what is looked at now and then is looked at after so many calls: 0, 1, 2, 4, 8 and so on."""
    return n_done & (n_done - 1) == 0


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gives back, free of any graph.

    ``loss`` (0-d) is that of the full batch, on every rank; ``outputs`` the model's outputs for the full
    batch in its own structure, where asked for.
    """

    loss: Tensor
    outputs: Any = None


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of :class:`Runtime`, which documents them."""

    loss_fn: Callable[[Any, Any], Tensor] | None
    n_microbatches: int
    schedule: str | Schedule | None
    device: torch.device | str | None
    mesh: DeviceMesh | None
    autocast: Autocast
    scaler: Any
    loss_reduction: Literal["mean", "sum"] | None
    loss_weight: LossWeight | None
    release: bool
    batch_dims: Mapping[str, int | None] | None
    stall_limit_s: float | None
    check_finite: bool
    feed: int | None
