"""Which tensors code that stays whole may write to, in branches too that the example does not take.

What it did write to on the example is left to ``record``.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from .statements import KeptStatement, definition

__all__ = ["may_write"]


def may_write(run: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among a statement's or a function's arguments that its own code writes into anywhere."""
    if isinstance(run, KeptStatement):
        code: ast.AST | None = run.part.statement
        given = dict(zip(run.given, args, strict=True))
    else:
        code = definition(run.__code__) if isinstance(run, types.FunctionType) else None
        given = inspect.signature(run).bind(*args, **kwargs).arguments if code is not None else {}
    names = {*_written_to(code)} if code is not None else set()
    return [value for name, value in given.items() if name in names and isinstance(value, Tensor)]


def _written_to(code: ast.AST) -> Iterator[str]:
    """Names of what is written into: ``x[i] = …``, ``x += …``, ``x.add_(…)``, ``out=x``."""
    for node in ast.walk(code):
        if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield from _root(node)
        elif isinstance(node, ast.AugAssign):
            yield from _root(node.target)
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if name.endswith("_") and not name.endswith("__"):
                yield from _root(node.func)
            for keyword in node.keywords:
                if keyword.arg == "out":
                    yield from _root(keyword.value)


def _root(node: ast.AST) -> Iterator[str]:
    """The name whose value a part or a view belongs to."""
    while isinstance(node, (ast.Subscript, ast.Attribute, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Name):
        yield node.id
