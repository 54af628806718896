"""Functions of a model's own that a call may run: of code kept whole a recording shows nothing inside.

What is looked for in them is left to ``thresholds`` and ``backwards``.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..calls.call import Call
from ..state.global_names import is_foreign

__all__ = ["all_names", "functions_within"]


def functions_within(model: nn.Module, call: Call) -> Iterator[tuple[types.FunctionType, Any]]:
    """Each function once, with the module that has it or nothing: what modules hold, and what that names."""
    inside = model.get_submodule(str(call.target)).modules() if call.op == "call_module" else ()
    todo: list[tuple[Any, Any]] = [(f, module) for module in inside for f in _held_by(module)]
    todo += [(getattr(call.target, "function", call.target), None)] if call.op != "call_module" else []
    seen: set[types.CodeType] = set()
    while todo:
        function, owner = todo.pop()
        if isinstance(function, types.FunctionType) and function.__code__ not in seen:
            seen.add(function.__code__)
            yield function, owner
            todo += [(f, owner) for f in _named_by(function) if not _is_foreign(f)]


def all_names(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes that code asks for, that within it as well."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from all_names(inner)


def _held_by(module: nn.Module) -> Iterator[Any]:
    """What code a module has for its calls, but for torch's own."""
    yield from vars(module).values()
    for base in type(module).__mro__:
        if not is_foreign(base.__module__):
            yield from (value for name, value in vars(base).items() if name != "__init__")


def _named_by(function: types.FunctionType) -> Iterator[Any]:
    """What a function names of its file, and of modules that it has there."""
    names = [*all_names(function.__code__)]
    for value in (function.__globals__.get(name) for name in names):
        yield value
        if isinstance(value, types.ModuleType) and not is_foreign(value.__name__):
            yield from (vars(value).get(name) for name in names)


def _is_foreign(value: Any) -> bool:
    return is_foreign(getattr(value, "__module__", None))
