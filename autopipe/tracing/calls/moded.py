"""Calls a module in other modes than it has: ``self.backbone.eval()`` in a forward that trains the rest.

Noticing that a forward does so is left to ``recorder``.
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["in_modes", "modes_of"]


def modes_of(module: nn.Module) -> bool | tuple[bool, ...]:
    """The mode of a module, or those of all inside where they are not one."""
    modes = tuple(m.training for m in module.modules())
    return modes[0] if len({*modes}) == 1 else modes


def in_modes(module: nn.Module, modes: bool | tuple[bool, ...], /, *args: Any, **kwargs: Any) -> Any:
    """What ``module`` gives in these ``modes``; those that it has are put back."""
    inside = list(module.modules())
    before = [m.training for m in inside]
    wanted = (modes,) * len(inside) if isinstance(modes, bool) else modes
    try:
        for each, mode in zip(inside, wanted, strict=True):
            each.training = mode
        return module(*args, **kwargs)
    finally:
        for each, mode in zip(inside, before, strict=True):
            each.training = mode
