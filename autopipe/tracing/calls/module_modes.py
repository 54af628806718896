"""Calls a module in modes other than its own: ``self.backbone.eval()`` in a forward that trains the rest.

Noticing that a forward does so is left to ``recorder``.
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["Modes", "in_modes"]

Modes = bool | None | tuple[bool | None, ...]
"""The mode of all modules in a module, or that of each; None is the one that it has."""


def in_modes(module: nn.Module, modes: Modes, /, *args: Any, **kwargs: Any) -> Any:
    """What ``module`` gives in these ``modes``; those that it has are put back."""
    inside = list(module.modules())
    before = [m.training for m in inside]
    wanted = modes if isinstance(modes, tuple) else (modes,) * len(inside)
    try:
        for each, mode in zip(inside, wanted, strict=True):
            if mode is not None:
                each.training = mode
        return module(*args, **kwargs)
    finally:
        for each, mode in zip(inside, before, strict=True):
            each.training = mode
