"""Checks that a model makes of its data, ``if bad(x): raise``: kept in a capture as run-time guards.

Finding that a value is read, and what it depends on, is left to ``recorder``.
"""

from __future__ import annotations

import ast
import functools
import linecache
from typing import Any

from ..errors import InputError

__all__ = ["expect", "is_check"]


def expect(value: Any, outcome: bool, where: str) -> None:
    """Raise :class:`InputError` where the truth of ``value`` is not what it was at capture."""
    if bool(value) is not outcome:
        raise InputError(
            f"{where}: a check of the data comes out {not outcome}, and {outcome} at capture; "
            "the model itself may refuse this input, else capture it with an example that takes this branch"
        )


def is_check(source: str) -> bool:
    """Whether the line ``file:line`` lies in a condition that can only raise.

    That is an ``assert``, the test of an ``if`` with a ``raise`` alone, or what ``torch._check`` and its like
    are given first.
    """
    filename, _, line = source.rpartition(":")
    return line.isdigit() and int(line) in _checked_lines(filename)


_CHECKERS = ("_check", "_check_value", "_check_index", "_check_tensor_all", "torch_compilable_check")


@functools.cache
def _checked_lines(filename: str) -> frozenset[int]:
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return frozenset()
    lines: set[int] = set()
    for condition in filter(None, map(_condition, ast.walk(tree))):
        lines.update(range(condition.lineno, (condition.end_lineno or condition.lineno) + 1))
    return frozenset(lines)


def _condition(node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.Assert):
        return node.test
    if isinstance(node, ast.If):
        return node.test if len(node.body) == 1 and isinstance(node.body[0], ast.Raise) else None
    if isinstance(node, ast.Call) and node.args:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return node.args[0] if name in _CHECKERS else None
    return None
