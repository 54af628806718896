"""Who makes gradients now: autopipe itself, or the user's own code.

What is refused of the latter is left to ``runtime``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["are_ours", "making"]

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
