"""Numbers that remember how they were made from tensor sizes, so that a capture stays right at others.

Turning their expressions into nodes, and comparisons into run-time checks, is left to ``recorder``.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

__all__ = [
    "Expression",
    "Sink",
    "TrackedFloat",
    "TrackedInt",
    "call",
    "counted",
    "pin",
    "pinned",
    "plain",
    "track",
]


@dataclasses.dataclass(eq=False, slots=True)
class Expression:
    """A number as ``function(*operands)``; operands are expressions, plain numbers or whatever a leaf holds.

    ``ref`` is the value's place in the recording: set for a size read from a tensor, and for the others
    once a recorded call has used them.
    """

    function: Any
    operands: tuple[Any, ...]
    value: Any
    ref: Any = None


class Sink(Protocol):
    """What tracked numbers report to while a model is being recorded."""

    @property
    def recording(self) -> bool:
        """Whether arithmetic is to be tracked now."""

    def guard(self, expression: Expression, outcome: Any) -> None:
        """A tracked number was turned into the plain ``outcome``: remember to check it."""

    def cast(self, name: str) -> None:
        """Code is about to make a plain number of a tracked one, maybe by calling ``int`` or ``float``."""

    def look_up(self, expression: Expression, outcome: Any) -> None:
        """A tracked number is a key, which may be found among others."""

    def say(self, expression: Expression, outcome: Any) -> None:
        """A tracked number becomes part of a text."""

    def made(self, expression: Expression) -> int:
        """A tracked number was made; what is added to it where C reads it without asking."""


def track(value: Any, expression: Expression, sink: Sink) -> Any:
    """``value`` as a tracked number; bools and what is no number stay plain and are guarded."""
    if isinstance(value, bool):
        sink.guard(expression, value)
        return value
    if isinstance(value, int):
        return TrackedInt.make(value, expression, sink)
    if isinstance(value, float):
        return TrackedFloat.make(value, expression, sink)
    return value


def plain(value: Any) -> Any:
    """A tracked number as an ordinary one; anything else as it is."""
    if isinstance(value, TrackedInt):
        return value.expression.value
    if isinstance(value, TrackedFloat):
        return value.expression.value
    return value


def call(function: Callable[..., Any], *operands: Any) -> Any:
    """The function on tracked or plain operands, tracked in turn while recording."""
    operands = tuple(map(_bare, operands))
    result = function(*map(plain, operands))
    tracked = [o for o in operands if isinstance(o, _Tracked)]
    sink = tracked[0].sink
    if result is NotImplemented or not sink.recording:
        return result
    inner = tuple(o.expression if isinstance(o, _Tracked) else o for o in operands)
    made = track(result, Expression(function, inner, result), sink)
    if type(made) is TrackedFloat and any(type(o) is TrackedFloat and o.is_numpys for o in tracked):
        made.is_numpys = True
    return made


def _bare(value: Any) -> Any:
    """A number as Python's own, whose answers are Python's own too: those of numpy's floats are not."""
    if isinstance(value, _Tracked) or type(value) in (int, float, bool):
        return value
    if isinstance(value, np.generic):
        return value.item()
    kind = next((k for k in (float, int) if isinstance(value, k)), None)
    return value if kind is None else kind(value)


def pinned(value: Any) -> Any:
    """The value: in a guard, one that stays as captured though other values seem to do no harm."""
    return value


def counted(start: Any, stop: Any, step: Any) -> range:
    """A range of plain numbers; where they come from sizes, how many there are is guarded."""
    if plain(step) == 0:
        return range(plain(start), plain(stop), 0)
    start, step = map(pin, (start, step))
    n = (stop - start + step - (1 if step > 0 else -1)) // step
    return range(start, start + step * max(pin(n), 0), step)


def _binary(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        return call(function, self, other) if isinstance(other, (int, float)) else NotImplemented

    return method


def _reflected(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        return call(function, other, self) if isinstance(other, (int, float)) else NotImplemented

    return method


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *rest: Any) -> Any:
        return call(function, self, *rest)

    return method


class _Tracked:
    """What tracked ints and floats share: arithmetic that stays tracked, conversions that are guarded."""

    expression: Expression
    sink: Sink

    __add__ = _binary(operator.add)
    __radd__ = _reflected(operator.add)
    __sub__ = _binary(operator.sub)
    __rsub__ = _reflected(operator.sub)
    __floordiv__ = _binary(operator.floordiv)
    __rfloordiv__ = _reflected(operator.floordiv)
    __truediv__ = _binary(operator.truediv)
    __rtruediv__ = _reflected(operator.truediv)
    __mod__ = _binary(operator.mod)
    __rmod__ = _reflected(operator.mod)

    def __pow__(self, other: Any, modulo: Any = None) -> Any:
        if modulo is not None:
            return pow(pin(self), pin(other), pin(modulo))
        return call(operator.pow, self, other) if isinstance(other, (int, float)) else NotImplemented

    __rpow__ = _reflected(operator.pow)
    __neg__ = _unary(operator.neg)
    __pos__ = _unary(operator.pos)
    __abs__ = _unary(operator.abs)
    __ceil__ = _unary(math.ceil)
    __floor__ = _unary(math.floor)
    __trunc__ = _unary(math.trunc)
    __round__ = _unary(round)
    __eq__ = _binary(operator.eq)
    __ne__ = _binary(operator.ne)
    __lt__ = _binary(operator.lt)
    __le__ = _binary(operator.le)
    __gt__ = _binary(operator.gt)
    __ge__ = _binary(operator.ge)

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, _REPEATED):
            return operator.mul(pin(self), other)
        return call(operator.mul, self, other) if isinstance(other, (int, float)) else NotImplemented

    def __rmul__(self, other: Any) -> Any:
        if isinstance(other, (int, float)):
            return call(operator.mul, other, self)
        return operator.mul(other, pin(self))

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __int__(self) -> int:
        self.cast("int")
        return int(pin(self))

    def __float__(self) -> float:
        self.cast("float")
        return float(pin(self))

    def __format__(self, spec: str) -> str:
        return format(self.said(), spec)

    def __str__(self) -> str:
        return str(self.said())

    def __repr__(self) -> str:
        return repr(self.said())

    def said(self) -> Any:
        """The plain number, for a text."""
        if self.sink.recording:
            self.sink.say(self.expression, plain(self))
        return plain(self)

    def __hash__(self) -> int:
        if self.sink.recording:
            self.sink.look_up(self.expression, plain(self))
        return hash(plain(self))

    def cast(self, name: str) -> None:
        if self.sink.recording:
            self.sink.cast(name)

    def __reduce__(self) -> Any:
        return type(plain(self)), (plain(self),)

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """What a function of numpy gives: tracked where it rounds, else of the numbers as they are."""
        if ufunc in _ROUNDING and method == "__call__" and not kwargs and isinstance(self, TrackedFloat):
            whole = call(_ROUNDING[ufunc], self)
            if not isinstance(whole, _Tracked):
                return np.float64(whole)
            rounded = call(float, whole)
            rounded.is_numpys = True
            return rounded
        return getattr(ufunc, method)(*map(pin, inputs), **kwargs)

    def settle(self) -> Any:
        """The plain number, guarded while recording: the caller bakes it in."""
        if self.sink.recording:
            self.sink.guard(self.expression, plain(self))
        return plain(self)


_REPEATED = (list, tuple, str, bytes, bytearray)
_ROUNDING: dict[Any, Callable[..., Any]] = {np.ceil: math.ceil, np.floor: math.floor, np.trunc: math.trunc}


class TrackedInt(_Tracked, int):  # type: ignore[misc]
    """An ``int`` made from sizes of tensors that depend on the inputs.

    Notes: what reads an int's value in C without asking its type (sequence indexing, arithmetic of a float
    with it) sees the plain number, or one that the sink has shifted; see ``hidden_sizes``.
    """

    def __and__(self, other: Any) -> Any:
        if type(other) is int and other > 0 and not other & (other + 1):
            return self % (other + 1)
        return operator.and_(*map(pin, (self, other)))

    def __lshift__(self, other: Any) -> Any:
        return self * 2**other if isinstance(other, int) else NotImplemented

    def __rshift__(self, other: Any) -> Any:
        return self // 2**other if isinstance(other, int) else NotImplemented

    def __invert__(self) -> Any:
        return -1 - self

    def __or__(self, other: Any) -> Any:
        return operator.or_(*map(pin, (self, other)))

    def __xor__(self, other: Any) -> Any:
        return operator.xor(*map(pin, (self, other)))

    def __rlshift__(self, other: Any) -> Any:
        return operator.lshift(other, pin(self))

    def __rrshift__(self, other: Any) -> Any:
        return operator.rshift(other, pin(self))

    def bit_length(self) -> int:
        return int(pin(self).bit_length())

    def bit_count(self) -> int:
        return int(pin(self).bit_count())

    def to_bytes(self, *args: Any, **kwargs: Any) -> bytes:
        return plain(pin(self)).to_bytes(*args, **kwargs)

    def as_integer_ratio(self) -> Any:
        return self, 1

    def conjugate(self) -> Any:
        return self

    real = numerator = property(conjugate)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """What ``type(n)(other)`` makes: a plain number, of which nothing is known."""
        return int(*args, **kwargs)

    @classmethod
    def make(cls, value: int, expression: Expression, sink: Sink) -> TrackedInt:
        new = int.__new__(cls, value + sink.made(expression))
        new.expression, new.sink = expression, sink
        return new


def pin(value: Any) -> Any:
    """A number for code that cannot be followed: one made from sizes stays as it is from here on."""
    if isinstance(value, _Tracked) and value.sink.recording:
        value.sink.guard(Expression(pinned, (value.expression,), plain(value)), plain(value))
    return plain(value)


class TrackedFloat(_Tracked, float):  # type: ignore[misc]
    """A ``float`` made from sizes of tensors that depend on the inputs.

    One that ``is_numpys`` has what a float of numpy has, which leaves it as it is from then on.
    """

    is_numpys = False

    def __getattr__(self, name: str) -> Any:
        if not self.is_numpys or name.startswith("__"):
            raise AttributeError(f"'float' object has no attribute {name!r}")
        return getattr(np.float64(pin(self)), name)

    def is_integer(self) -> bool:
        return bool(self % 1 == 0)

    def hex(self) -> str:
        return float.hex(pin(self))

    def as_integer_ratio(self) -> Any:
        return float.as_integer_ratio(pin(self))

    def __int__(self) -> int:
        self.cast("int")
        return int(pin(self))

    def __new__(cls, *args: Any) -> Any:
        """As of the int: a plain number."""
        return float(*args)

    @classmethod
    def make(cls, value: float, expression: Expression, sink: Sink) -> TrackedFloat:
        new = float.__new__(cls, value + sink.made(expression))
        new.expression, new.sink = expression, sink
        return new
