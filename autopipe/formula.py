"""Sizes as formulas of the input dims: read from text by a grammar of their own, evaluated at given dims.

Making formulas is left to ``tracing`` (shapes) and ``measure`` (costs). Text is never run as Python nor given
to sympy's parser; only sympy's objects are made of it, within limits that keep every formula quick.

::

    sum     = [-] product {(+ | -) product}
    product = power {(* | / | // | %) power}
    power   = [-] atom [** whole number]
    atom    = number | dim | (sum) | function(sum {, sum})
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .errors import InputError

if TYPE_CHECKING:
    import sympy

__all__ = ["Size", "parse_size", "size_at", "symbol"]

Size = Any
"""An ``int`` or a sympy expression in the graph's dims (``batch``, ``seq``, …)."""

_TOKEN = re.compile(r"\s*(\d+\.?\d*(?:[eE][+-]?\d+)?|[A-Za-z_]\w*|\*\*|//|[-+*/%(),])", re.ASCII)
_FUNCTIONS = {"floor": 1, "ceiling": 1, "Mod": 2, "Max": 8, "Min": 8}
"""Functions with the most arguments they take."""
_LONGEST, _DEEPEST, _MOST_CALLS = 4000, 24, 16
_HEAVIEST = 40
"""Factors of up to 63 bits, or dims, that a term may multiply: none of it grows without bound."""


@functools.cache
def symbol(name: str) -> sympy.Symbol:
    """The sympy symbol of an input dim: a positive integer."""
    import sympy

    return sympy.Symbol(name, integer=True, positive=True)


@functools.lru_cache(4096)
def _parsed(text: str) -> Size:
    return _Parser(text).read()


def parse_size(text: int | float | str) -> Size:
    """A size from its text form, the inverse of ``str`` on a sympy expression in the dims.

    Only arithmetic, ``floor``, ``ceiling``, ``Mod``, ``Max`` and ``Min`` are read: nothing is evaluated
    as Python, so a file from elsewhere is safe to open. Raises :class:`InputError` for anything else and for
    formulas longer, deeper or of a higher degree than any model's.

    >>> parse_size("2*batch + 1").subs({symbol("batch"): 4})
    9
    >>> parse_size(7)
    7
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool) and math.isfinite(text):
        return text
    if not isinstance(text, str):
        raise InputError(f"cannot read {text!r} as a size in the input dims")
    return _parsed(text)


def size_at(size: Size, dims: Mapping[str, int]) -> float:
    """The value of a size where the input dims have the given values.

    >>> size_at(parse_size("batch*seq"), {"batch": 2, "seq": 8})
    16.0
    """
    if isinstance(size, (int, float)):
        return size
    return _at(size, tuple((name, operator.index(value)) for name, value in dims.items()))


@functools.lru_cache(1 << 14)
def _at(size: Size, dims: tuple[tuple[str, int], ...]) -> float:
    """The value of a formula: those of alike layers are the same ones."""
    return float(size.subs({symbol(name): value for name, value in dims}))


class _Parser:
    """Recursive descent over the tokens; each part is (expression, how many factors it multiplies)."""

    def __init__(self, text: str):
        self.text, self.at, self.depth, self.calls = text, 0, 0, 0
        self.tokens: list[str] = []
        if len(text) > _LONGEST:
            raise self._error(f"it has {len(text)} characters, more than {_LONGEST}")
        place = 0
        while text[place:].strip():
            match = _TOKEN.match(text, place)
            if match is None:
                raise self._error(f"{text[place:].strip()[0]!r} is no part of a formula")
            self.tokens.append(match[1])
            place = match.end()

    def read(self) -> Size:
        found = self._sum()[0]
        if self.at < len(self.tokens):
            raise self._error(f"{self.tokens[self.at]!r} does not belong there")
        if not isinstance(found, (int, float)) and not found.is_finite and _is_endless(found):
            raise self._error("it divides by zero")
        return found

    def _error(self, why: str) -> InputError:
        shown = self.text if len(self.text) <= 60 else f"{self.text[:57]}…"
        return InputError(f"cannot read {shown!r} as a size in the input dims: {why}")

    def _next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _take(self, *wanted: str) -> str:
        token = self._next()
        if token not in wanted:
            return ""
        self.at += 1
        return token

    def _need(self, wanted: str) -> None:
        if not self._take(wanted):
            raise self._error(f"{wanted!r} is missing")

    def _sum(self) -> tuple[Size, int]:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise self._error(f"it is nested deeper than {_DEEPEST}")
        negative = self._take("-")
        value, weight = self._product()
        value = -value if negative else value
        while sign := self._take("+", "-"):
            other, more = self._product()
            value, weight = (value + other if sign == "+" else value - other), max(weight, more)
        self.depth -= 1
        return value, weight

    def _product(self) -> tuple[Size, int]:
        value, weight = self._power()
        while sign := self._take("*", "/", "//", "%"):
            other, more = self._power()
            weight = self._weighed(weight + more)
            if sign != "*" and other == 0:
                raise self._error("it divides by zero")
            value = value * other if sign == "*" else self._divided(sign, value, other)
        return value, weight

    def _divided(self, sign: str, value: Size, other: Size) -> Size:
        import sympy

        if sign == "/":
            return sympy.Number(value) / other if isinstance(value, (int, float)) else value / other
        return value // other if sign == "//" else value % other

    def _power(self) -> tuple[Size, int]:
        negative = self._take("-")
        value, weight = self._atom()
        if self._take("**"):
            sign = -1 if self._take("-") else 1
            power = self._next()
            if not re.fullmatch(r"\d{1,2}", power):
                raise self._error("powers are whole numbers of at most two digits")
            self.at += 1
            weight = self._weighed(weight * max(1, int(power)))
            if sign < 0 and value == 0:
                raise self._error("it divides by zero")
            value = value ** int(power) if sign > 0 else self._divided("/", 1, value ** int(power))
        return (-value if negative else value), weight

    def _atom(self) -> tuple[Size, int]:
        token = self._next()
        self.at += 1
        if token == "(":
            found = self._sum()
            self._need(")")
            return found
        if token[:1].isdecimal():
            return self._number(token), 1
        if token in _FUNCTIONS:
            return self._call(token)
        if not token.isidentifier() or len(token) > 64:
            raise self._error(f"{token!r} does not belong there" if token else "it ends too soon")
        return symbol(token), 1

    def _number(self, token: str) -> int | float:
        value = int(token) if token.isdecimal() and len(token) < 20 else float(token)
        if abs(value) >= 1 << 63:
            raise self._error(f"{token} is too large")
        return value

    def _call(self, name: str) -> tuple[Size, int]:
        import sympy

        self.calls += 1
        if self.calls > _MOST_CALLS:
            raise self._error(f"it calls functions more than {_MOST_CALLS} times")
        self._need("(")
        parts = [self._sum()]
        while self._take(","):
            parts.append(self._sum())
        self._need(")")
        most = _FUNCTIONS[name]
        if len(parts) > most or (len(parts) != most and most < 3):
            raise self._error(f"{name} takes {most} arguments, not {len(parts)}")
        values = [value for value, _ in parts]
        if name == "Mod" and values[1] == 0:
            raise self._error("it divides by zero")
        return getattr(sympy, name)(*values), max(weight for _, weight in parts)

    def _weighed(self, weight: int) -> int:
        if weight > _HEAVIEST:
            raise self._error(f"it multiplies more than {_HEAVIEST} factors")
        return weight


def _is_endless(expression: Any) -> bool:
    import sympy

    return bool(expression.has(sympy.zoo, sympy.nan, sympy.oo))
