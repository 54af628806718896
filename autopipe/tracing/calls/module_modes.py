"""Calls a module in modes other than its own, or with weights that are frozen meanwhile.

Forwards do so that train the rest: ``self.backbone.eval()``, ``p.requires_grad = False``. Noticing that is
left to ``recorder``.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..members import registered

__all__ = ["Modes", "in_modes"]

Modes = bool | None | tuple[bool | None, ...]
"""The mode of all modules in a module, or that of each; None is the one that it has."""


def in_modes(module: nn.Module, modes: Modes, frozen: tuple[str, ...], /, *args: Any, **kwargs: Any) -> Any:
    """What ``module`` gives in these ``modes``, with the weights named ``frozen``; all is put back."""
    inside = list(module.modules())
    before = [m.training for m in inside]
    weights = [p for p in (registered(module, name) for name in frozen) if p.requires_grad]
    wanted = modes if isinstance(modes, tuple) else (modes,) * len(inside)
    try:
        for each, mode in zip(inside, wanted, strict=True):
            if mode is not None:
                each.training = mode
        for weight in weights:
            weight.requires_grad_(False)
        return module(*args, **kwargs)
    finally:
        for each, mode in zip(inside, before, strict=True):
            each.training = mode
        for weight in weights:
            weight.requires_grad_()
