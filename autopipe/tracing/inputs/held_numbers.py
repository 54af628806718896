"""Plain numbers in attributes of modules that may be others in each call, as a schedule's are.

They are given to a call beside its arguments, in a dict by path and name, and are in a graph what free
numbers among the arguments are. Which attributes those are is left to ``captured``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

__all__ = ["HELD", "divided", "numbers_of", "placed"]

HELD = "its own"
"""The keyword under which a call has them: no name, so that no parameter of a forward has it."""


def divided(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A call's own keyword arguments, and the numbers by path and name that are given beside them."""
    return {k: v for k, v in kwargs.items() if k != HELD}, kwargs.get(HELD) or {}


def numbers_of(model: nn.Module, names: Iterable[str]) -> dict[str, Any]:
    """What attributes hold by path and name; None for those that are not there."""
    return {name: vars(module).get(field) for name in names for module, field in [_place(model, name)]}


@contextlib.contextmanager
def placed(model: nn.Module, numbers: Mapping[str, Any]) -> Iterator[None]:
    """Within it attributes hold these numbers; those that code has set then hold what it left there."""
    before = numbers_of(model, numbers)
    for name, number in numbers.items():
        module, field = _place(model, name)
        vars(module)[field] = number
    try:
        yield
    finally:
        for name, number in numbers.items():
            module, field = _place(model, name)
            if vars(module).get(field) is number:
                vars(module)[field] = before[name]


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, field = name.rpartition(".")
    return model.get_submodule(path), field
