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
    "parts",
    "plainly",
    "slots",
    "slotted",
]

SIMPLE = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, enum.Enum)
_CLOSED = (type, torch.Tensor, nn.Module)
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


def is_filled(cell: types.CellType) -> bool:
    """Whether a closure's cell holds something yet."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def plainly(value: Any, depth: int = _DEEPEST_CODE) -> Any:
    """A value in a form that compares: its parts and theirs; of tensors and modules the class alone.

    >>> def around(k):
    ...     return lambda x: x * k
    >>> plainly(around(2)) == plainly(around(2)), plainly(around(2)) == plainly(around(3))
    (True, False)
    """
    if isinstance(value, SIMPLE):
        return type(value), value
    if isinstance(value, (torch.Tensor, nn.Module)) or depth == 0:
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


def contents(value: Any, depth: int = _DEEPEST) -> Any:
    """What an object holds, in a form that compares; None for what holds nothing that its owner may change.

    >>> held = contents([1, {"a": 2}])
    >>> held == contents([1, {"a": 2}]), held == contents([1, {"a": 3}])
    (True, False)
    """
    if isinstance(value, (*SIMPLE, *_CLOSED)) or callable(value) or depth == 0:
        return None
    held = parts(value)
    if held is None:
        return value if _tells_equal(type(value)) else None
    form = ((k, v if isinstance(v, SIMPLE) else contents(v, depth - 1)) for k, v in held.items())
    return type(value).__qualname__, tuple(form)


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
