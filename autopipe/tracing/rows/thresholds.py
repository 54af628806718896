"""Numbers that code kept whole compares with: of rows it may do something else from so many on.

Sizes that a recording shows are asked for by formula; in code that stays whole, a size is a plain number.
Running a form on more rows than that is left to ``mixing``.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..calls.call import Recording
from ..calls.named import Named
from .by_mode import is_own

__all__ = ["thresholds"]

_MOST = 256
"""More rows than this are not tried."""
_SIZES = frozenset({"len", "numel", "shape", "size"})


def thresholds(model: nn.Module, form: Recording, least: int) -> list[int]:
    """Whole numbers above ``least`` that the model's own code in calls compares with, from small to large."""
    found: dict[types.CodeType, set[int]] = {}
    for call in (c for c in form.calls if is_own(model, c)):
        inside = model.get_submodule(str(call.target)).modules() if call.op == "call_module" else ()
        todo: list[tuple[Any, Any]] = [(f, module) for module in inside for f in _held_by(module)]
        todo += [(call.target.function, None)] if isinstance(call.target, Named) else []
        while todo:
            function, owner = todo.pop()
            if not isinstance(function, types.FunctionType) or function.__code__ in found:
                continue
            found[function.__code__] = {*_compared(function, owner)}
            named = (function.__globals__.get(name) for name in function.__code__.co_names)
            todo += [(f, owner) for f in named if not _is_torchs(f)]
    return sorted(n for n in set[int]().union(*found.values()) if least < n <= _MOST)


def _held_by(module: nn.Module) -> Iterator[Any]:
    """What code a module has for its calls, but for torch's own."""
    yield from vars(module).values()
    for base in type(module).__mro__:
        if not _is_torchs(base) and base is not object:
            yield from (value for name, value in vars(base).items() if name != "__init__")


def _is_torchs(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("torch.")


def _compared(function: types.FunctionType, owner: Any) -> Iterator[int]:
    """The whole numbers in lines of a function that compare: written there, or of ``owner`` or the file."""
    if not _SIZES.intersection(function.__code__.co_names):
        return
    lines: dict[int, list[dis.Instruction]] = {}
    line = 0
    for step in dis.get_instructions(function):
        line = step.starts_line or line
        lines.setdefault(line, []).append(step)
    for steps in lines.values():
        for step in steps if any(map(_is_order, steps)) else ():
            value = step.argval
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                value = getattr(owner, str(value), None)
            elif step.opname == "LOAD_GLOBAL":
                value = function.__globals__.get(str(value))
            elif step.opname != "LOAD_CONST":
                continue
            if isinstance(value, int) and not isinstance(value, bool):
                yield value


def _is_order(step: dis.Instruction) -> bool:
    return step.opname == "COMPARE_OP" and str(step.argval).startswith(("<", ">"))
