"""What a user should know of a model that was recorded: where steps in microbatches are less than its calls.

How it was recorded is noted where that is decided, in ``session``.
"""

from __future__ import annotations

from collections.abc import Iterator

from .making import Made

__all__ = ["told"]


def told(made: Made) -> Iterator[str]:
    """Of what a call does beside what it returns, what a step does otherwise."""
    if by_call := made.variation.mixing.said_by_call:
        yield by_call
