"""What a model's Python asked about sizes, kept exactly: as formulas where they are known, else in the graph.

Trying other sizes and fitting formulas to what is seen is left to ``explore`` and ``dims``.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from ...errors import InputError
from ...units import Size
from ..calls.call import Call, Depends, Guard, Recording
from ..calls.named import Named, unnamed
from .rerun import with_guards

__all__ = ["SIGNS", "ExpectSize", "broken", "computed", "inferred", "is_fitted", "is_stepped", "with_checks"]

_VIEWS = frozenset({"reshape", "view", torch.reshape})
SIGNS = {
    operator.eq: "==", operator.ne: "!=", operator.lt: "<", operator.le: "<=", operator.gt: ">",
    operator.ge: ">=",
}  # fmt: skip


def is_stepped(formula: Size) -> bool:
    """Whether a formula rounds: one that was fitted to a few points may then be off at others."""
    import sympy

    return isinstance(formula, sympy.Basic) and formula.has(sympy.floor)


def computed(call: Call, numbers: Mapping[int, Size]) -> Size | None:
    """A number as the formula that its own arithmetic makes of its operands'; None where fitting is as good.

    Sums, products and powers of whole numbers do not need it: two points cannot tell ``n % 16`` from 0. A
    quotient of whole numbers is exact until more is done with it than to round or compare it. What floating
    point has a say in, and what no formula tells, is left to the function itself: ``isqrt(batch)``.
    """
    function = unnamed(call.target)
    operands = [numbers.get(id(a), a) if isinstance(a, Call) else a for a in call.args]
    if (
        getattr(function, "__module__", "") not in _MODULES
        or call.kwargs
        or not any(map(_has_symbols, operands))
    ):
        return None
    if function in _ROUNDING and len(operands) == 1:
        formula = _ROUNDING[function](*operands)
    elif not all(map(_is_whole, operands)):
        formula = None
    elif function in _STEPS:
        formula = _STEPS[function](*operands)
    elif function in _SMOOTH:
        return function(*operands) if any(map(is_stepped, operands)) else None
    else:
        formula = None
    return _left_to(function, operands) if formula is None else formula


def inferred(
    call: Call, shapes: Mapping[int, tuple[tuple[Size, ...], ...]], numbers: Mapping[int, Size]
) -> tuple[int, Size] | None:
    """The axis whose size a call leaves to torch, as ``x.view(-1, 8)`` does, and its formula.

    That is how much there is in the whole by what the other axes take. None where the call leaves none, or
    the formula of any is not known.
    """
    if call.target not in _VIEWS or len(call.args) < 2 or call.kwargs or not isinstance(call.args[0], Call):
        return None
    told = call.args[1] if isinstance(call.args[1], (tuple, list)) else call.args[1:]
    sizes: list[Any] = [numbers.get(id(n)) if isinstance(n, Call) else n for n in told]
    whole = shapes.get(id(call.args[0]))
    if sizes.count(-1) != 1 or None in sizes or not whole:
        return None
    axis = sizes.index(-1)
    taken = math.prod(n for i, n in enumerate(sizes) if i != axis)
    there_is: Any = math.prod(whole[0])
    return axis, _ratio(there_is, taken)


def _left_to(function: Any, operands: Sequence[Any]) -> Size | None:
    """A formula that calls the function itself; see :class:`Check`."""
    import sympy

    if not all(isinstance(o, (int, float, sympy.Basic)) for o in operands):
        return None
    return sympy.Function(function.__name__)(*operands)


def is_fitted(call: Call, numbers: Mapping[int, Size]) -> bool:
    """Whether no formula tells a number that is made of such as change with sizes: a common divisor, say.

    What it is at a few sizes, it need not be at the next. Sums, products, quotients and powers are told.
    """
    is_told = unnamed(call.target) in (*_SMOOTH, operator.truediv)
    return not is_told and any(_has_symbols(numbers.get(id(c))) for c in call.inputs)


def _is_whole(value: Any) -> bool:
    return type(value) is int or (_has_symbols(value) and bool(value.is_integer))


def _has_symbols(value: Any) -> bool:
    return bool(getattr(value, "free_symbols", ()))


def _ratio(a: Any, b: Any) -> Any:
    import sympy

    return a / sympy.sympify(b)


def _quotient(a: Any, b: Any) -> Any:
    import sympy

    return sympy.floor(_ratio(a, b))


def _floor(value: Any) -> Any:
    import sympy

    return sympy.floor(value)


def _whole(value: Any) -> Any:
    """What ``int`` makes of a number; None of one that may be below zero, which is rounded up."""
    return _floor(value) if value.is_integer or value.is_nonnegative else None


_STEPS: dict[Any, Callable[..., Any]] = {
    operator.truediv: _ratio,
    operator.floordiv: _quotient,
    operator.mod: lambda a, b: a - b * _quotient(a, b),
}
_ROUNDING: dict[Any, Callable[..., Any]] = {
    math.ceil: lambda value: -_floor(-value),
    math.floor: _floor,
    math.trunc: _whole,
    int: _whole,
    float: lambda value: value,
}
_SMOOTH = (operator.add, operator.sub, operator.mul, operator.neg, operator.pow)
_MODULES = (math.__name__, operator.add.__module__, round.__module__)
"""Where functions are that a formula may call: ``Check`` knows them."""


def broken(guard: Guard, numbers: Mapping[int, Any]) -> str:
    """How a guard came out differently where calls, by id, gave these numbers; "" where it did not."""
    values = [numbers[id(o)] if isinstance(o, Call) else o for o in guard.operands]
    if guard.function(*values) == guard.outcome:
        return ""
    sign = SIGNS.get(guard.function)
    text = f"{values[0]} {sign} {values[1]}" if sign else f"{values[0]} == {guard.outcome}"
    return f"{guard.source} decides by it ({text})"


class ExpectSize(Named):
    """Raises :class:`InputError` where a question about sizes comes out otherwise than at capture."""

    def __init__(self, guard: Guard) -> None:
        super().__init__(self._check, "expect_size")
        self.guard = guard

    def _check(self, *operands: Any) -> None:
        guard = self.guard
        if guard.function(*operands) == guard.outcome:
            return
        sign = SIGNS.get(guard.function)
        if sign:
            left, right = operands
            raise InputError(
                f"{guard.source}: the model asks whether {left} {sign} {right}, which was {guard.outcome} at "
                "the captured sizes; capture again at this size"
            )
        raise InputError(
            f"{guard.source}: a size that the model settled on is {operands[0]}, and was {guard.outcome} at "
            "capture; capture again at this size"
        )


def with_checks(recording: Recording, guards: Collection[int], taken: Collection[str]) -> Recording:
    """The recording with those of its guards whose ids are given checked in the graph, where they stand.

    ``taken`` are the names in use in either form.
    """
    chosen = [g for g in recording.guards if id(g) in guards]
    if not chosen:
        return recording
    calls = with_guards(dataclasses.replace(recording, guards=chosen))
    names = _fresh(taken)
    place = {id(c): i for i, c in enumerate(calls)}
    behind: dict[int, list[Call]] = {}
    for guard in chosen:
        call = Call("call_function", ExpectSize(guard), guard.operands, hint="expect_size", path=guard.path)
        call.source, call.is_check, call.depends = guard.source, True, Depends.SHAPE
        behind.setdefault(max(place[id(o)] for o in call.inputs), []).append(call)
    out = [c for i, call in enumerate(calls) for c in (call, *behind.get(i, ()))]
    for call in out:
        call.name = call.name or next(names)
    return dataclasses.replace(recording, calls=out)


def _fresh(taken: Collection[str]) -> Iterator[str]:
    number = 0
    while True:
        number += 1
        if (name := f"expect_size_{number}") not in taken:
            yield name
