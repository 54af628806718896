"""Blocks of a stage that keep only their inputs, and run again in backward.

Which blocks those are is said by the plan; whole stages that run again are left to ``runtime``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from . import rng

__all__ = ["Block"]


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A part of a stage as a function of the stage and the values that the part takes.

    With gradients it keeps those values alone, and computes the rest again in backward with the same random
    numbers: those of the :class:`rng.Scope` it first ran in, or of the generators as they were then, Python's
    and numpy's too where it ``is_outside``.
    """

    forward: Callable[..., tuple[Any, ...]]
    is_random: bool
    is_outside: bool

    def __call__(self, stage: nn.Module, *values: Any) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return self.forward(stage, *values)
        scope = rng.opened()
        again: contextlib.AbstractContextManager[Any] = scope or contextlib.nullcontext()
        if scope is None and self.is_outside:
            again = rng.Outside().keep()
        out: tuple[Any, ...] = checkpoint(
            self.forward,
            stage,
            *values,
            use_reentrant=False,
            preserve_rng_state=self.is_random and scope is None,
            context_fn=lambda: (contextlib.nullcontext(), again),
        )
        return out
