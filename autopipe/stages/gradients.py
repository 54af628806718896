"""Who makes gradients now, autopipe itself or the user's own code; whether what is made now may have some.

What is refused of the user's is left to ``runtime``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["are_ours", "making", "outside_inference"]

_MAKING: list[None] = []


@contextlib.contextmanager
def making() -> Iterator[None]:
    """Within it gradients are made by a step, or to be compared and put back."""
    _MAKING.append(None)
    try:
        yield
    finally:
        _MAKING.pop()


def are_ours() -> bool:
    """Whether they are, now; backwards on other threads included."""
    return bool(_MAKING)


@contextlib.contextmanager
def outside_inference() -> Iterator[None]:
    """Within it tensors are made that train later, though the caller is in ``inference_mode``."""
    records = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(records):
        yield
