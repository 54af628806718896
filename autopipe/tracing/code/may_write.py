"""Which tensors code that stays whole may write to, in branches too that the example does not take.

What it did write to on the example is left to ``record``.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .opaque import Recorded
from .statements import KeptStatement, definition

__all__ = ["may_write"]


def may_write(run: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among a statement's or a function's arguments that its own code writes into anywhere."""
    if isinstance(run, KeptStatement):
        code: ast.AST | None = run.part.statement
        given, known = [*zip(run.given, args, strict=True)], run.function.__globals__
    else:
        code = definition(run.__code__) if isinstance(run, types.FunctionType) else None
        given = [*_bound(run, args, kwargs)] if code is not None else []
        known = getattr(run, "__globals__", {})
    names = {*_written_to(code, {**known, **dict(given)}, {})} if code is not None else set()
    return [value for name, value in given if name in names and isinstance(value, Tensor)]


_Met = dict[ast.AST, set[str]]
"""By the definition of a function, which of its arguments it writes into; none while it is looked into."""


def _written_to(code: ast.AST, known: Mapping[str, Any], met: _Met) -> Iterator[str]:
    """Names of what is written into: ``x[i] = …``, ``x += …``, ``x.add_(…)``, ``out=x``, ``relu_(x)``.

    Functions among what is ``known`` by name are looked into, each once.
    """
    for node in ast.walk(code):
        if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield from _root(node)
        elif isinstance(node, ast.AugAssign):
            yield from _root(node.target)
        elif isinstance(node, ast.Call):
            written = [node.func, *node.args[:1]] if _is_in_place(node) else []
            written += [k.value for k in node.keywords if k.arg == "out"]
            for each in (*written, *_written_by(node, known, met)):
                yield from _root(each)


def _is_in_place(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    asked = (k.value for k in call.keywords if k.arg == "inplace")
    return (name.endswith("_") and not name.endswith("__")) or any(getattr(v, "value", True) for v in asked)


def _written_by(call: ast.Call, known: Mapping[str, Any], met: _Met) -> list[ast.expr]:
    """The arguments of a call that the function it calls writes into; all of them where they are starred."""
    function, own = _called(call.func, known)
    code = definition(function.__code__) if function is not None else None
    if function is None or code is None or str(function.__module__).split(".")[0] == "torch":
        return []
    if code not in met:
        met[code] = set()
        met[code] = {*_written_to(code, function.__globals__, met)}
    names = met[code]
    arguments = [*call.args, *(k.value for k in call.keywords)]
    if any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
        return [getattr(a, "value", a) for a in arguments] if names else []
    try:
        bound = [*_bound(function, (*own, *call.args), {str(k.arg): k.value for k in call.keywords})]
    except TypeError:
        return []
    return [value for name, value in bound if name in names and isinstance(value, ast.expr)]


def _bound(function: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a function's parameters are given, by their names; of those with stars each value by itself."""
    signature = inspect.signature(function)
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        kind = signature.parameters[name].kind
        is_starred = kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        values = (value.values() if isinstance(value, dict) else value) if is_starred else (value,)
        yield from ((name, each) for each in values)


def _called(func: ast.expr, known: Mapping[str, Any]) -> tuple[types.FunctionType | None, tuple[None, ...]]:
    """The Python function that an expression names, and what stands for its ``self``."""
    names: list[str] = []
    while isinstance(func, ast.Attribute):
        names, func = [func.attr, *names], func.value
    found = known.get(func.id) if isinstance(func, ast.Name) else None
    holder: Any = None
    for name in names:
        holder, found = found, inspect.getattr_static(found, name, None)
    if isinstance(found, Recorded):
        first = found.args[0]
        found = inspect.getattr_static(type(first), names[-1]) if isinstance(first, nn.Module) else first
    is_method = isinstance(found, types.FunctionType) and not isinstance(
        holder, (type, types.ModuleType, type(None))
    )
    if isinstance(found, (staticmethod, types.MethodType)):
        is_method, found = isinstance(found, types.MethodType), found.__func__
    return (found if isinstance(found, types.FunctionType) else None), (None,) * is_method


def _root(node: ast.AST) -> Iterator[str]:
    """The name whose value a part or a view belongs to."""
    while isinstance(node, (ast.Subscript, ast.Attribute, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Name):
        yield node.id
