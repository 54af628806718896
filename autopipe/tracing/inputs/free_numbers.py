"""Plain numbers among the arguments of calls whose values may vary from call to call.

A number that one call has and another has not is such a number from then on. In a graph it is an input, as a
tensor without dims, of which the number is read; where the model itself runs it is the number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .structure import flatten, unflatten

__all__ = ["FreeFloat", "FreeInt", "FreeNumber", "as_tensor", "freed", "is_number", "like", "plainly_given"]


class FreeInt(int):
    """A whole number that may be another in each call, with another that it has been: ``before``.

    ``is_set``: it is in an attribute, and calls may leave another there. One that ``stands_for_float`` is
    recorded as a float: what Python makes of ``1.0 / n`` is seen where both are floats.
    """

    before: int
    is_set: bool
    stands_for_float: bool


class FreeFloat(float):
    """A float that may be another in each call; see :class:`FreeInt`."""

    before: float
    is_set: bool
    stands_for_float = False


FreeNumber = FreeInt | FreeFloat


def is_number(value: Any) -> bool:
    """Whether a value is one of Python's own numbers, which may be made free; flags are none."""
    return type(value) in (int, float)


def freed(value: Any, before: Any, *, is_set: bool = False, stands_for_float: bool = False) -> FreeNumber:
    """A number made free."""
    made: FreeNumber
    if isinstance(value, int):
        made = FreeInt(value)
        made.stands_for_float = stands_for_float
    else:
        made = FreeFloat(value)
    made.before, made.is_set = before, is_set
    return made


def like(number: FreeNumber, value: Any, before: Any) -> FreeNumber:
    """Another free number in the place of one."""
    return freed(value, before, is_set=number.is_set, stands_for_float=number.stands_for_float)


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
