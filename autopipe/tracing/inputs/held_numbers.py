"""Plain numbers in attributes of modules that may be others in each call, as a schedule's and a count's are.

They are given to a call beside its arguments, in a dict by path and name (``layer.count``, and
``layer.state['n']`` for one in a dict, list or object that an attribute holds), and are in a graph what free
numbers among the arguments are. Which those are is left to ``captured`` and ``repeats``, what calls leave in
some of them to ``writes``.
"""

from __future__ import annotations

import ast
import contextlib
import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..members import submodule
from .free_numbers import FreeInt, FreeNumber, freed, is_number

__all__ = [
    "HELD",
    "as_floats",
    "content_of",
    "counted",
    "divided",
    "is_of_class",
    "leave",
    "names_inside",
    "names_set",
    "numbers_of",
    "owner_of",
    "place_inside",
    "placed",
]

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


def owner_of(name: str) -> tuple[str, str]:
    """The path of the module of a number by its name, and the rest of the name."""
    head, bracket, key = name.partition("[")
    path, _, field = head.rpartition(".")
    return path, field + bracket + key


def names_inside(field: str, value: Any) -> Iterator[str]:
    """What numbers in a dict, list or object that an attribute holds are called behind its module's path."""
    held = content_of(value)
    items = enumerate(held) if isinstance(held, list) else (held or {}).items()
    yield from (f"{field}[{k!r}]" for k, v in items if isinstance(k, (str, int)) and is_number(v))


def place_inside(model: nn.Module, name: str) -> tuple[Any, Any]:
    """What holds a number, and under which key; it is None where that is not there."""
    path, field = owner_of(name)
    field, bracket, key = field.partition("[")
    held: Any = vars(submodule(model, path))
    return (content_of(held.get(field)), ast.literal_eval(key[:-1])) if bracket else (held, field)


def content_of(value: Any) -> dict[Any, Any] | list[Any] | None:
    """The dict or list that holds what a value does; None of what is a class, a function or torch's."""
    if type(value) in (dict, list):
        held: dict[Any, Any] | list[Any] = value
        return held
    if callable(value) or isinstance(value, (torch.Tensor, torch.Generator, enum.Enum)):
        return None
    try:
        found = object.__getattribute__(value, "__dict__")  # whatever it does when it is asked for attributes
    except AttributeError:
        return None
    return found if type(found) is dict else None


def numbers_of(model: nn.Module, names: Iterable[str]) -> dict[str, Any]:
    """What attributes hold by path and name, or their classes; None for those that are not there."""
    return {name: _number_of(model, name) for name in names}


def _number_of(model: nn.Module, name: str) -> Any:
    held, key = place_inside(model, name)
    if isinstance(held, list):
        return held[key] if key < len(held) else None
    cls = type(submodule(model, owner_of(name)[0]))
    return None if held is None else held.get(key, None if "[" in name else getattr(cls, key, None))


def is_of_class(model: nn.Module, name: str) -> bool:
    """Whether an attribute, by path and name, is that of a module's class alone."""
    held, key = place_inside(model, name)
    return "[" not in name and held is not None and key not in held


def leave(model: nn.Module, numbers: Mapping[str, Any]) -> None:
    """Let attributes hold these numbers."""
    for name, number in numbers.items():
        held, key = place_inside(model, name)
        if isinstance(held, dict) or (held is not None and key < len(held)):
            held[key] = number


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
