"""A file beside the models' own, as users have: settings, counters and helpers that a forward reaches."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

SCALE = 2.0
CALLS = 0
LIMITS = {"most": 3.0}


class Settings:
    """Settings kept on a class."""

    scale = 2.0
    calls = 0
    depth: ClassVar[dict[str, float]] = {"first": 1.0}


def scaled(x: Tensor) -> Tensor:
    """Goes by a global of this file."""
    return x * SCALE


def counted(x: Tensor) -> Tensor:
    """Counts its calls in a global of this file."""
    global CALLS
    CALLS += 1
    return x * 2 if CALLS > 5 else x


def ticking() -> Any:
    """A function that counts its calls in what it encloses."""
    calls = 0

    def tick() -> int:
        nonlocal calls
        calls += 1
        return calls

    return tick
