"""Plain numbers in attributes of modules that may be others in each call, as a schedule's and a count's are.

They are given to a call beside its arguments, in a dict by path and name, and are in a graph what free
numbers among the arguments are. Which attributes those are is left to ``captured`` and ``repeats``, what
calls leave in some of them to ``writes``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from .free_numbers import FreeInt, FreeNumber, freed

__all__ = ["HELD", "as_floats", "counted", "divided", "leave", "names_set", "numbers_of", "placed"]

HELD = "its own"
"""The keyword under which a call has them: no name, so that no parameter of a forward has it."""


def divided(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A call's own keyword arguments, and the numbers by path and name that are given beside them."""
    return {k: v for k, v in kwargs.items() if k != HELD}, kwargs.get(HELD) or {}


def counted(kwargs: Mapping[str, Any], numbers: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    """A call's keyword arguments with numbers beside them that calls set: by path and name as they are, and
    as one call leaves them."""
    own, held = divided(kwargs)
    more = {name: freed(value, after, is_set=True) for name, (value, after) in numbers.items()}
    return {**own, HELD: {**held, **more}}


def as_floats(kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The same with whole numbers that calls set recorded as floats; None where none is left to be."""
    own, held = divided(kwargs)
    found = {
        name: freed(int(n), n.before, is_set=True, stands_for_float=True)
        for name, n in held.items()
        if isinstance(n, FreeInt) and n.is_set and not n.stands_for_float
    }
    return {**own, HELD: {**held, **found}} if found else None


def names_set(kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """By path and name, the numbers given beside a call's arguments that calls set."""
    held = divided(kwargs)[1]
    return tuple(name for name, number in held.items() if isinstance(number, FreeNumber) and number.is_set)


def numbers_of(model: nn.Module, names: Iterable[str]) -> dict[str, Any]:
    """What attributes hold by path and name, or their classes; None for those that are not there."""
    places = ((name, *_place(model, name)) for name in names)
    return {name: vars(m).get(field, getattr(type(m), field, None)) for name, m, field in places}


def leave(model: nn.Module, numbers: Mapping[str, Any]) -> None:
    """Let attributes hold these numbers."""
    for name, number in numbers.items():
        module, field = _place(model, name)
        vars(module)[field] = number


@contextlib.contextmanager
def placed(model: nn.Module, numbers: Mapping[str, Any]) -> Iterator[None]:
    """Within it attributes hold these numbers; those that code has set then hold what it left there."""
    before = numbers_of(model, numbers)
    leave(model, numbers)
    try:
        yield
    finally:
        after = numbers_of(model, numbers)
        leave(model, {name: before[name] for name, number in numbers.items() if after[name] is number})


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, field = name.rpartition(".")
    return model.get_submodule(path), field
