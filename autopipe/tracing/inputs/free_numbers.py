"""Plain numbers among the arguments of calls whose values may vary from call to call.

A number that one call has and another has not is such a number from then on. In a graph it is an input, as a
tensor without dims, of which the number is read; where the model itself runs it is the number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .structure import flatten, unflatten

__all__ = ["FreeFloat", "FreeInt", "FreeNumber", "as_tensor", "freed", "is_number", "plainly_given"]


class FreeInt(int):
    """A whole number that may be another in each call, with another that it has been: ``before``."""

    before: int


class FreeFloat(float):
    """A float that may be another in each call, with another that it has been: ``before``."""

    before: float


FreeNumber = FreeInt | FreeFloat


def is_number(value: Any) -> bool:
    """Whether a value is one of Python's own numbers, which may be made free; flags are none."""
    return type(value) in (int, float)


def freed(value: Any, before: Any) -> FreeNumber:
    """A number made free."""
    made = FreeInt(value) if isinstance(value, int) else FreeFloat(value)
    made.before = before
    return made


def as_tensor(value: float) -> torch.Tensor:
    """A number as an input of graphs; on the host, where it is read."""
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64, device="cpu")


def plainly_given(given: Any, of: Callable[[Any], Any] | None = None) -> Any:
    """Arguments with plain numbers for free ones, or what ``of`` makes of those."""
    leaves, spec = flatten(given)
    if not any(isinstance(leaf, FreeNumber) for leaf in leaves):
        return given
    plain = of or (lambda number: int(number) if isinstance(number, int) else float(number))
    return unflatten(spec, [plain(v) if isinstance(v, FreeNumber) else v for v in leaves])
