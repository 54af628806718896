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
    """Raise :class:`InputError` where the truth of ``value`` is not what it was when the model was captured."""
    if bool(value) is not outcome:
        raise InputError(
            f"{where}: a check of the data comes out {not outcome}, and {outcome} when the model was captured; "
            "the model itself may refuse this input, else capture it with an example that takes this branch"
        )


def is_check(source: str) -> bool:
    """Whether the line ``file:line`` lies in an ``assert`` or in the test of an ``if`` that only raises."""
    filename, _, line = source.rpartition(":")
    return line.isdigit() and int(line) in _checked_lines(filename)


@functools.cache
def _checked_lines(filename: str) -> frozenset[int]:
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return frozenset()
    lines: set[int] = set()
    for node in ast.walk(tree):
        is_raise = isinstance(node, ast.If) and len(node.body) == 1 and isinstance(node.body[0], ast.Raise)
        if isinstance(node, ast.Assert) or is_raise:
            test = node.test  # type: ignore[attr-defined]
            lines.update(range(test.lineno, (test.end_lineno or test.lineno) + 1))
    return frozenset(lines)
