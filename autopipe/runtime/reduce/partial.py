"""Calculations of torch's that want every gradient of a model, refused where a rank has a part of them.

``torch.nn.utils.clip_grad_norm_`` would clip each rank's part by that part's own norm, and ``LBFGS`` search
along it. Clipping over all ranks is left to ``precision``.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor, nn

from ...errors import InputError, StaleError
from ...torch_private import CLIP

__all__ = ["Partial", "refuse_line_search", "watch"]

LINE_SEARCH = "torch.optim.lbfgs"


class Partial(Protocol):
    """Who trains a part of a model here."""

    def partial(self) -> Iterable[nn.Parameter]:
        """Parameters that are here while others of the same model are not."""


_watched: weakref.WeakSet[Partial] = weakref.WeakSet()


def watch(owner: Partial) -> None:
    """From now on, while it lives, refuse clipping by the norm of its part."""
    _watched.add(owner)
    module, name = CLIP
    present = getattr(module, name)
    if not hasattr(present, "looks_for_parts"):
        setattr(module, name, _looking(present))


def _looking(clip: Any) -> Any:
    @functools.wraps(clip)
    def clipped(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        part = {id(p) for owner in _watched for p in owner.partial()}
        if any(id(p) in part for p in parameters):
            raise StaleError(
                "these parameters are this rank's own, and their norm is not that of the model's gradients: "
                "rt.clip_grad_norm_(max_norm) clips and returns the norm over all ranks"
            )
        return clip(parameters, *args, **kwargs)

    clipped.looks_for_parts = True  # type: ignore[attr-defined]
    return clipped


def refuse_line_search() -> None:
    """Raise :class:`InputError` where a closure of torch's ``LBFGS`` has called this."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == LINE_SEARCH:
            raise InputError(
                "LBFGS searches along the gradients of all parameters, and each rank has only its own: use "
                "an optimizer that takes parameters one by one (SGD, Adam), or train in one process"
            )
