"""Contexts that the model's own code is in: grad mode, autocast, attention's kernels, hooks on what is saved.

One that the code enters is noted even where it changes nothing now: called in other surroundings it will.
Noticing that one is entered is left to ``patches``, entering it again to ``regions``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..calls import regions
from ..calls.regions import Region, SavedHooks

__all__ = ["ENTERED", "Contexts"]

_GRAD_MODES = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled)
ENTERED = (*_GRAD_MODES, torch.autocast, saved_tensors_hooks)
"""The classes of contexts that are noted."""


class Contexts:
    """Those entered by the code that is being recorded, outermost first, and what was in force before."""

    def __init__(self) -> None:
        self.base = regions.ambient()
        self.devices = [device for device, *_ in self.base[1]]
        self.entered: list[Any] = []

    def enter(self, context: Any) -> None:
        self.entered.append(context)

    def leave(self, context: Any) -> None:
        """Forget the context, where it was noted at all."""
        for i in reversed(range(len(self.entered))):
            if self.entered[i] is context:
                del self.entered[i]
                return

    @property
    def sets_grad(self) -> bool:
        """Whether the code itself has said what the grad mode is here."""
        return any(isinstance(c, _GRAD_MODES) for c in self.entered)

    def region(self) -> Region | None:
        """What is in force here beside what the model is called in."""
        now = regions.ambient(self.devices)
        if now == self.base and not self.entered:
            return None
        casts = {c.device for c in self.entered if isinstance(c, torch.autocast)}
        hooks = [c for c in self.entered if isinstance(c, saved_tensors_hooks)]
        saved = SavedHooks(hooks[-1].pack_hook, hooks[-1].unpack_hook) if hooks else None
        return regions.difference(self.base, now, self.sets_grad, casts, saved)
