"""Numbers that code kept whole compares with: of rows it may do something else from so many on.

Sizes that a recording shows are asked for by formula; in code that stays whole, a size is a plain number.
Running a form on more rows than that is left to ``mixing``.
"""

from __future__ import annotations

import dis
import itertools
import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from ..calls.call import Recording
from ..inputs.contents import is_filled
from .by_mode import is_own
from .own_code import functions_within

__all__ = ["thresholds"]

_MOST = 256
"""More rows than this are not tried."""
_SIZES = frozenset({"len", "numel", "shape", "size"})


def thresholds(model: nn.Module, form: Recording, least: int) -> list[int]:
    """Whole numbers above ``least`` that the model's own code in calls compares with, from small to large."""
    found: dict[types.CodeType, set[int]] = {}
    for call in (c for c in form.calls if is_own(model, c)):
        for function, owner in functions_within(model, call):
            if function.__code__ not in found:
                found[function.__code__] = {*_compared(function, owner)}
    return sorted(n for n in set[int]().union(*found.values()) if least < n <= _MOST)


def _compared(function: types.FunctionType, owner: Any) -> Iterator[int]:
    """The whole numbers in lines of a function that compare: written there, or held by what these name."""
    if _SIZES.isdisjoint(function.__code__.co_names):
        return
    steps = [*dis.get_instructions(function)]
    variables = _variables(function, steps)
    lines: dict[int, list[dis.Instruction]] = {}
    for step in steps:
        lines.setdefault((step.positions and step.positions.lineno) or 0, []).append(step)
    for line in lines.values():
        for step in line if any(map(_is_order, line)) else ():
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                values = [getattr(owner, str(step.argval), None)]
            elif step.opname == "LOAD_GLOBAL":
                values = [function.__globals__.get(str(step.argval))]
            elif step.opname == "LOAD_CONST":
                values = [step.argval]
            else:
                values = variables.get(step.argval, []) if step.opname.startswith("LOAD_") else []
            yield from (v for v in values if isinstance(v, int) and not isinstance(v, bool))


def _variables(function: types.FunctionType, steps: Sequence[dis.Instruction]) -> dict[str, list[Any]]:
    """What a function's variables hold, as far as it is written: defaults, constants, what is around it."""
    code = function.__code__
    arguments, defaults = code.co_varnames[: code.co_argcount], function.__defaults__ or ()
    given = dict(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    given |= (function.__kwdefaults__ or {}) | {n: c.cell_contents for n, c in cells if is_filled(c)}
    held = {name: [value] for name, value in given.items()}
    for constant, step in itertools.pairwise(steps):
        if constant.opname == "LOAD_CONST" and step.opname.startswith("STORE_"):
            held.setdefault(str(step.argval), []).append(constant.argval)
    return held


def _is_order(step: dis.Instruction) -> bool:
    if step.opname == "COMPARE_OP":
        return str(step.argval).startswith(("<", ">"))
    return step.opname == "LOAD_GLOBAL" and step.argval in ("min", "max")
