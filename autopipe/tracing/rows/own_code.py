"""Functions of a model's own that a call may run: of code kept whole a recording shows nothing inside.

What is looked for in them is left to ``thresholds`` and ``backwards``.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..calls.call import Call
from ..inputs.contents import is_filled
from ..state.global_names import is_foreign

__all__ = ["functions_within", "names_within"]


def functions_within(model: nn.Module, call: Call) -> Iterator[tuple[types.FunctionType, Any]]:
    """Each function once, with the module that has it or nothing: what modules hold, and what that names."""
    return ((held, owner) for held, owner in _within(model, call) if isinstance(held, types.FunctionType))


def names_within(model: nn.Module, call: Call) -> frozenset[str]:
    """The names of globals and attributes that those ask for, and of the contexts that they are run in."""
    held = [held for held, _ in _within(model, call)]
    names = (name for f in held if isinstance(f, types.FunctionType) for name in _names_in(f.__code__))
    return frozenset(names).union(type(f.__self__).__name__ for f in held if isinstance(f, types.MethodType))


def _within(model: nn.Module, call: Call) -> Iterator[tuple[Any, Any]]:
    """What a call's code is made of, each once, with the module that has it."""
    inside = model.get_submodule(str(call.target)).modules() if call.op == "call_module" else ()
    todo: list[tuple[Any, Any]] = [(f, module) for module in inside for f in _held_by(module)]
    todo += [(getattr(call.target, "function", call.target), None)] if call.op != "call_module" else []
    seen: dict[int, Any] = {}
    while todo:
        held, owner = todo.pop()
        if id(held) in seen:
            continue
        seen[id(held)] = held
        yield held, owner
        inner = [*_around(held), *(_named_by(held) if isinstance(held, types.FunctionType) else ())]
        todo += [(each, owner) for each in inner if not _is_foreign(each)]


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes that code asks for, that within it as well."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names_in(inner)


def _held_by(module: nn.Module) -> Iterator[Any]:
    """What code a module has for its calls, hooks among it, but for torch's own."""
    yield from vars(module).values()
    yield from (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    for base in type(module).__mro__:
        if not is_foreign(base.__module__):
            yield from (value for name, value in vars(base).items() if name != "__init__")


def _around(held: Any) -> Iterator[Any]:
    """What code something is around: a decorated function, a property, a class."""
    if isinstance(held, types.FunctionType):
        yield vars(held).get("__wrapped__")
        yield from (c.cell_contents for c in held.__closure__ or () if is_filled(c))
    elif isinstance(held, (staticmethod, classmethod, types.MethodType)):
        yield held.__func__
    elif isinstance(held, property):
        yield from (held.fget, held.fset)
    elif isinstance(held, (functools.partial, functools.partialmethod, functools.cached_property)):
        yield held.func
    elif isinstance(held, type) and issubclass(held, torch.autograd.Function):
        yield from vars(held).values()


def _named_by(function: types.FunctionType) -> Iterator[Any]:
    """What a function names of its file, and of modules that it has there."""
    names = [*_names_in(function.__code__)]
    for value in (function.__globals__.get(name) for name in names):
        yield value
        if isinstance(value, types.ModuleType) and not is_foreign(value.__name__):
            yield from (vars(value).get(name) for name in names)


def _is_foreign(value: Any) -> bool:
    is_bound = isinstance(value, types.MethodType)  # as the context is that a decorator of torch's enters
    return not is_bound and is_foreign(getattr(value, "__module__", None))
