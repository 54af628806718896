"""What values are made of, and by that: forms of them that compare, and whether two are alike.

Taking structures with tensors in them apart is left to ``structure``.
"""

from __future__ import annotations

import array
import cmath
import contextlib
import dataclasses
import enum
import functools
import inspect
import logging
import types
from collections import UserDict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = [
    "SIMPLE",
    "are_equal_tensors",
    "are_told_alike",
    "contents",
    "is_filled",
    "is_whole",
    "parts",
    "plainly",
    "slots",
    "slotted",
]

SIMPLE = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, enum.Enum)
_CLOSED = (type, torch.Tensor, nn.Module)
_WITH_ITEMS = (
    dict, UserDict, list, tuple, deque, np.ndarray, bytearray, array.array, functools.partial,
    types.MethodType, types.FunctionType,
)  # fmt: skip
_OF_THE_PROCESS = (types.ModuleType, logging.Filterer)
"""Kinds of objects that lead to the whole program: modules of code, and loggers with their handlers."""
_DEEPEST = 4
"""How deep data is looked into, which may lead anywhere and back."""
_DEEPEST_CODE = 6


def parts(value: Any) -> dict[Any, Any] | None:
    """What a value is made of, by key or name; None where it is one piece, as a number or a class is.

    Of a container its items, of an array its elements, as bytes where they are numbers, of a function the
    values that it was made around, of an object that cannot be called its attributes, slots among them.

    >>> parts([5, 6]), parts({"a": 1}), parts(5)
    ({0: 5, 1: 6}, {'a': 1}, None)
    """
    if isinstance(value, (dict, UserDict)):
        return dict(value.items())
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    if isinstance(value, (set, frozenset)):
        return {item: item for item in value}
    if isinstance(value, np.ndarray):
        elements = [*value.flat] if value.dtype.hasobject else value.tobytes()
        return {"dtype": str(value.dtype), "shape": value.shape, "elements": elements}
    if isinstance(value, (bytearray, array.array)):
        return {"elements": bytes(value)}
    if isinstance(value, slice):
        return {"start": value.start, "stop": value.stop, "step": value.step}
    if isinstance(value, functools.partial):
        return {"function": value.func, "args": value.args, "kwargs": value.keywords}
    if isinstance(value, types.MethodType):
        return {"function": value.__func__, "self": value.__self__}
    if isinstance(value, types.FunctionType):
        code, cells = value.__code__, value.__closure__ or ()
        held = {n: c.cell_contents for n, c in zip(code.co_freevars, cells, strict=True) if is_filled(c)}
        return {"__code__": code, "__defaults__": (value.__defaults__, value.__kwdefaults__), **held}
    if isinstance(value, (*SIMPLE, *_CLOSED)) or callable(value):
        return None
    if hasattr(value, "__dict__"):
        return {**slotted(value), **vars(value)}
    # what tells of itself whether it is equal may fill a slot only when asked, as a path does
    is_one_piece = _tells_equal(type(value)) and not dataclasses.is_dataclass(value)
    return None if is_one_piece else slotted(value) or None


def slots(value: Any) -> Iterator[tuple[str, types.MemberDescriptorType]]:
    """An object's slots by name, those of its own class first."""
    for cls in type(value).__mro__:
        if "__slots__" in vars(cls):
            yield from ((n, s) for n, s in vars(cls).items() if isinstance(s, types.MemberDescriptorType))


def slotted(value: Any) -> dict[str, Any]:
    """What an object has in slots, by name, whatever its class makes of reading them."""
    found: dict[str, Any] = {}
    for name, slot in slots(value):
        with contextlib.suppress(AttributeError):  # an empty one
            found.setdefault(name, slot.__get__(value))
    return found


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number or a truth, or a tensor of such."""
    if isinstance(value, torch.Tensor):
        return not (value.is_floating_point() or value.is_complex())
    return isinstance(value, int)


def is_filled(cell: types.CellType) -> bool:
    """Whether a closure's cell holds something yet."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def plainly(value: Any, depth: int = _DEEPEST_CODE) -> Any:
    """A value in a form that compares: its parts and theirs; of tensors the class, of modules which it is.

    >>> def around(k):
    ...     return lambda x: x * k
    >>> plainly(around(2)) == plainly(around(2)), plainly(around(2)) == plainly(around(3))
    (True, False)
    """
    if isinstance(value, SIMPLE):
        return type(value), value
    if isinstance(value, nn.Module):
        return type(value), id(value)
    if isinstance(value, torch.Tensor) or depth == 0:
        return type(value)
    held = parts(value)
    if held is None:
        return value if callable(value) or _tells_equal(type(value)) else type(value)
    left = (depth if callable(value) else min(depth, _DEEPEST)) - 1
    form = {key: plainly(part, left) for key, part in held.items()}
    is_ordered = isinstance(value, (dict, UserDict))
    return type(value).__qualname__, tuple(form.items()) if is_ordered else form


def _tells_equal(cls: Any) -> bool:
    """Whether a class says of its values, which stay as they are, when two are equal."""
    return cls.__eq__ is not object.__eq__ and cls.__hash__ is not None


class Contents:
    """What a value held when this was made, however deep, to be compared with what it holds later.

    Two are equal where the same steps lead to equal pieces in both, whichever objects on the way are one.
    ``nodes`` are the values met, the first first, each with its kind and, by key, what is in it: a simple
    value, or another's place among the nodes.
    """

    def __init__(self, value: Any) -> None:
        self.nodes: list[tuple[Any, Any]] = []
        held, places = [value], {id(value): 0}
        for each in held:  # which grows meanwhile, and keeps what is made on the way
            inside = _inside(each)
            if inside is None:
                self.nodes.append((None, _told(each)))
                continue
            found = []
            for key, part in inside.items():
                is_simple = isinstance(part, SIMPLE)
                if not is_simple and id(part) not in places:
                    places[id(part)] = len(held)
                    held.append(part)
                found.append((key, is_simple, part if is_simple else places[id(part)]))
            self.nodes.append((type(each).__qualname__, found))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Contents):
            return NotImplemented
        waiting, met = [(0, 0)], {(0, 0)}
        while waiting:
            a, b = waiting.pop()
            (kind, mine), (other_kind, theirs) = self.nodes[a], other.nodes[b]
            if kind != other_kind or (kind is None and not _is_one(mine, theirs)):
                return False
            if kind is None:
                continue
            if len(mine) != len(theirs):
                return False
            for (key, is_simple, x), (other_key, is_other, y) in zip(mine, theirs, strict=True):
                if is_simple != is_other or not _is_one(key, other_key):
                    return False
                if is_simple and not _is_one(x, y):
                    return False
                if not is_simple and (x, y) not in met:
                    met.add((x, y))
                    waiting.append((x, y))
        return True

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Contents:
        # nothing writes to it, and functions, which are not copied, lead to the modules that they did
        return self


def contents(value: Any) -> Contents | None:
    """What a value holds; None of what holds nothing that its owner may change.

    A module, a class and what is built in are told by which they are, a module of code by its name, a tensor
    by its elements, a function by its code, what it was made around and the globals that it names. Linear in
    the values that lie within.

    >>> held = contents([1, {"a": 2}])
    >>> held == contents([1, {"a": 2}]), held == contents([1, {"a": 3}])
    (True, False)
    """
    return None if isinstance(value, (*SIMPLE, *_CLOSED)) else Contents(value)


def _inside(value: Any) -> dict[Any, Any] | None:
    """What is in a value, by key; None of one piece.

    That is what :func:`parts` gives, beside items and functions their attributes, and what is in code.
    """
    if isinstance(value, (*SIMPLE, *_CLOSED, *_OF_THE_PROCESS)):
        return None
    if isinstance(value, types.CodeType):
        return {name: getattr(value, name) for name in ("co_code", "co_consts", "co_names", "co_varnames")}
    if isinstance(value, (set, frozenset)):
        return {item: item for item in sorted(value, key=_in_order)}
    held = parts(value)
    is_built_in = callable(value) and not inspect.isfunction(type(value).__call__)
    if not hasattr(value, "__dict__") or (held is None and is_built_in):
        return held
    # what a class makes again where it is missing says nothing new
    made = [n for n in vars(value) if isinstance(getattr(type(value), n, None), functools.cached_property)]
    own = {name: v for name, v in vars(value).items() if name not in made}
    if held is None or not isinstance(value, _WITH_ITEMS):
        return {**slotted(value), **own}
    if isinstance(value, types.FunctionType):
        held = {**held, "__globals__": _named_beside(value)}
    return {**held, "__dict__": own} if own else held


def _named_beside(function: types.FunctionType) -> dict[str, Any]:
    """The globals that a function's code names, but for functions of other files."""
    known, codes, found = function.__globals__, [function.__code__], {}
    for code in codes:  # which grows meanwhile
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        for name in known.keys() & set(code.co_names):
            value = known[name]
            if not isinstance(value, types.FunctionType) or value.__globals__ is known:
                found[name] = value
    return dict(sorted(found.items()))


def _in_order(item: Any) -> tuple[str, int]:
    """Sorts equal sets alike, those of texts in another process too."""
    return repr(item) if isinstance(item, SIMPLE) else "", hash(item)


def _told(piece: Any) -> Any:
    """What one piece is told by: a module of code, which cannot be pickled, by its name.

    Others by themselves, or by their class alone where one is not told from another, as two locks are not.
    """
    if isinstance(piece, types.ModuleType):
        return piece.__name__
    is_itself = callable(piece) or isinstance(piece, _CLOSED) or _tells_equal(type(piece))
    return piece if is_itself else type(piece)


def _is_one(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return are_equal_tensors(a, b)
    try:
        return type(a) is type(b) and bool(a == b)
    except (RuntimeError, ValueError, TypeError):
        return False


def are_told_alike(a: Any, b: Any) -> bool:
    """Whether two values, of which neither is a tensor, tell the same as far as can be seen.

    Numbers up to rounding; what can be called, and tensors within objects, count as alike.
    """
    return not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) and _alike(a, b, _DEEPEST)


def _alike(a: Any, b: Any, depth: int) -> bool:
    if isinstance(a, (float, complex, np.inexact)) and isinstance(b, (int, float, complex, np.inexact)):
        return bool(a == b or cmath.isclose(a, b, rel_tol=1e-4) or (a != a and b != b))
    if isinstance(a, SIMPLE) or isinstance(b, SIMPLE):
        return bool(a == b)
    is_closed, is_other = (isinstance(v, _CLOSED) or callable(v) for v in (a, b))
    if is_closed or is_other or depth == 0:
        return is_closed == is_other
    mine, other = parts(a), parts(b)
    if mine is None or other is None:
        return bool(plainly(a) == plainly(b))
    return mine.keys() == other.keys() and all(_alike(v, other[k], depth - 1) for k, v in mine.items())


def are_equal_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are alike in dtype, place and shape and equal in each element.

    Not-a-number is equal to itself. Where no elements can be compared, on meta or in another layout than
    strided, a tensor is equal to itself alone.
    """
    if a is b:
        return True
    is_alike = a.dtype == b.dtype and a.device == b.device and a.shape == b.shape
    if not is_alike or a.is_meta or not a.layout is b.layout is torch.strided:
        return False
    return bool(torch.equal(a, b) or ((a == b) | ((a != a) & (b != b))).all())
