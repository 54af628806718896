"""Whether a model's own code asks if two of its values are one object, which no graph can tell.

Whether the answer matters is left to ``runs``, holding calls against it to ``arguments``.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..inputs.contents import is_filled
from ..members import modules_in
from ..state.quick_check import Remembered
from ..state.reach import HOOKS

__all__ = ["compares"]

_IS = dis.opmap["IS_OP"]
_VARIABLES = frozenset(op for name, op in dis.opmap.items() if name.startswith(("LOAD_FAST", "LOAD_DEREF")))
_SHARED = frozenset(op for name, op in dis.opmap.items() if name.startswith("LOAD_DEREF"))
_NAMES = frozenset({"id", "is_", "is_not"})
_CODED = (types.FunctionType, type(functools.lru_cache(lambda: None)))
_CALLED = (*_CODED, types.MethodType, functools.partial)
_HOLDING = (property, staticmethod, classmethod, functools.cached_property, functools.partialmethod)
_NOT_IN_CALLS = frozenset(
    {"__init__", "__new__", "__init_subclass__", "__class_getitem__", "__set_name__", "__reduce__",
     "__reduce_ex__", "__getstate__", "__setstate__"}
)  # fmt: skip
"""Methods that Python calls by itself where modules are made or written down."""


def compares(model: nn.Module) -> bool:
    """Whether code that a call of the model may come to compares variables by identity.

    That is functions that its modules hold, hooks among them, and what its classes and their files have under
    names to which those, ``forward`` and what Python calls by itself lead, from each to the next.
    """
    modules = [m for _, m in modules_in(model)]
    held = (v for m in modules for v in vars(m).values() if type(v) in _CALLED)
    hooks = (h for m in modules for kind in HOOKS for h in vars(m).get(kind, {}).values())
    classes = frozenset(cls for m in modules for cls in type(m).__mro__[:-1])
    return _compare(classes, frozenset(f for v in (*held, *hooks) for f in _functions(v)))


_compared: Remembered[tuple[frozenset[type], frozenset[types.FunctionType]], bool] = Remembered(1 << 6)


def _compare(classes: frozenset[type], beside: frozenset[types.FunctionType]) -> bool:
    files = {c.__module__ for c in classes if not _is_torchs(c.__module__)}
    named = (v for file in files for v in list(vars(sys.modules.get(file, types)).values()))
    now = [v for cls in classes for v in vars(cls).values()] + [v for v in named if isinstance(v, _CODED)]
    return _compared.of((classes, beside), now, lambda: _compare_now(classes, beside))


def _compare_now(classes: frozenset[type], beside: frozenset[types.FunctionType]) -> bool:
    held: dict[str, list[tuple[bool, types.FunctionType]]] = {}
    for cls in classes:
        for name, value in vars(cls).items():
            held.setdefault(name, []).extend((not _is_torchs(cls.__module__), f) for f in _functions(value))
    for file in {c.__module__ for c in classes if not _is_torchs(c.__module__)}:
        for name, value in list(vars(sys.modules.get(file, types)).items()):
            if isinstance(value, _CODED) and value.__module__ == file:
                held.setdefault(name, []).extend((True, f) for f in _functions(value))
    held[""] = [(True, f) for f in beside]
    waiting = ["", "forward", *(n for n in held if n[:2] == n[-2:] == "__" and n not in _NOT_IN_CALLS)]
    seen = {*waiting}
    while waiting:
        for is_own, function in held.get(waiting.pop(), ()):
            if is_own and _code_compares(function.__code__, _made_of_code(function)):
                return True
            new = _texts(function.__code__) - seen
            seen |= new
            waiting += new
    return False


def _is_torchs(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "builtins", "typing", "abc")


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """The functions that an attribute of a class is made of, those that it is wrapped around among them."""
    waiting: list[Any] = [value]
    seen: set[int] = set()
    while waiting:
        part = waiting.pop()
        if id(part) in seen or not isinstance(part, (*_CALLED, *_HOLDING)):
            continue
        seen.add(id(part))
        if isinstance(part, types.FunctionType):
            yield part
            cells = (c.cell_contents for c in part.__closure__ or () if is_filled(c))
            waiting += (c for c in cells if isinstance(c, _CODED))
        waiting += (getattr(part, name, None) for name in ("fget", "fset", "__func__", "func", "__wrapped__"))


def _made_of_code(function: types.FunctionType) -> frozenset[str]:
    """The variables that a function has from around it and that hold functions or classes: no values."""
    pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    held = ((name, cell.cell_contents) for name, cell in pairs if is_filled(cell))
    return frozenset(name for name, content in held if isinstance(content, (*_CODED, type)))


def _texts(code: types.CodeType) -> set[str]:
    """All names that code has, also as texts: an attribute may be asked for by either."""
    inner = [_texts(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}.union(*inner)


def _code_compares(code: types.CodeType, apart: frozenset[str] = frozenset()) -> bool:
    """Whether ``is`` stands behind a variable in code, but for those set ``apart``, or ids are asked for."""
    operations, at = code.co_code[::2], -1
    while (at := operations.find(_IS, at + 1)) >= 0:
        is_variable = at > 0 and operations[at - 1] in _VARIABLES
        if is_variable and not (operations[at - 1] in _SHARED and _shared_at(code, at - 1) in apart):
            return True
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return not _NAMES.isdisjoint(code.co_names) or any(_code_compares(c, apart) for c in inner)


def _shared_at(code: types.CodeType, at: int) -> str:
    """The variable of other functions too that an operation of code loads."""
    return next(str(i.argval) for i in dis.get_instructions(code) if i.offset == 2 * at)
