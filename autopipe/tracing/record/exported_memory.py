"""Tensors whose memory is handed to code outside of torch, such as numpy, whose writes torch does not count.

What follows from such a write is left to ``recorder``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..calls.functions import HANDING, storages
from ..inputs.contents import are_equal_tensors

__all__ = ["HandedOut"]


class HandedOut:
    """Tensors that were handed out, each with what it held then."""

    def __init__(self) -> None:
        self._held: list[tuple[torch.Tensor, int, torch.Tensor]] = []

    def note(self, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """A function of torch is being called."""
        if func in HANDING:
            (tensor, *_) = args
            if tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_inference()):
                self._held.append((tensor, tensor._version, tensor.detach().clone()))

    def written(self) -> frozenset[int]:
        """The ids of the memory that holds something else now, uncounted."""
        if not self._held:
            return frozenset()
        changed = (t for t, version, was in self._held if t._version == version and _is_other(t, was))
        return frozenset().union(*map(storages, changed))

    def forget(self) -> None:
        """From now on what was handed out so far is not looked at."""
        self._held.clear()


def _is_other(tensor: torch.Tensor, was: torch.Tensor) -> bool:
    return not are_equal_tensors(tensor, was)
