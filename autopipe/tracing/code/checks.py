"""Checks that a model makes of its data, ``if bad(x): raise``: kept in a capture as run-time guards.

Finding that a value is read, and what it depends on, is left to ``recorder``.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from ...errors import InputError
from ..calls.call import Recording
from ..inputs.structure import flatten
from .callees import nodes
from .messages import CHECKERS, called, error_lines

__all__ = [
    "expect", "expect_nothing", "expecting_nothing", "hands_on", "is_check", "is_in_writer", "is_tried",
    "nothings",
]  # fmt: skip


def expect(value: Any, outcome: bool, where: str) -> None:
    """Raise :class:`InputError` where the truth of ``value`` is not what it was at capture."""
    if bool(value) is not outcome:
        raise InputError(
            f"{where}: a check of the data comes out {not outcome}, and {outcome} at capture; "
            "the model itself may refuse this input, else capture it with an example that takes this branch"
        )


def expect_nothing(value: Any, places: Collection[int], where: str) -> None:
    """Raise :class:`InputError` where ``value`` has None elsewhere among its leaves than at capture."""
    found = nothings(value)
    if found != list(places):
        raise InputError(
            f"{where}: this code gives None at {found or 'no place'} of what it gives, and at "
            f"{list(places) or 'no place'} at capture; capture with an example on which it does the same"
        )


def nothings(value: Any) -> list[int]:
    """Which leaves of a nested value are None, by number."""
    return [i for i, leaf in enumerate(flatten(value)[0]) if leaf is None]


def expecting_nothing(forms: Mapping[bool, Sequence[Recording]]) -> list[str]:
    """The places of code in recordings that gives None as data say: what it gives else is refused."""
    calls = (c for each in forms.values() for form in each for c in form.calls)
    return [*dict.fromkeys(c.source for c in calls if c.target is expect_nothing)]


def is_check(source: str) -> bool:
    """Whether the line ``file:line`` lies in a condition that can only raise.

    That is an ``assert``, the test of an ``if`` with a ``raise`` alone, or what ``torch._check`` and its like
    are given first.
    """
    return _lies_in(source, _checked_lines)


def hands_on(source: str) -> bool:
    """Whether the line ``file:line`` returns what it asks: the line that called it is the one to look at."""
    return _lies_in(source, _returning_lines)


def is_tried(source: str) -> bool:
    """Whether the line ``file:line`` lies in a ``try`` whose errors are handled."""
    return _lies_in(source, _tried_lines)


def is_in_writer(source: str) -> bool:
    """Whether the line ``file:line`` lies in a function that writes values into a text in C: ``"%d" % n``.

    Not one that only words errors.
    """
    return _lies_in(source, _writers_lines)


def _lies_in(source: str, lines_of: Callable[[str], frozenset[int]]) -> bool:
    filename, _, line = source.rpartition(":")
    return line.isdecimal() and int(line) in lines_of(filename)


_WRITING = re.compile(r"""["']\s*%|dumps?\(""")


@functools.cache
def _checked_lines(filename: str) -> frozenset[int]:
    return _lines(filter(None, map(_condition, nodes(filename))))


@functools.cache
def _returning_lines(filename: str) -> frozenset[int]:
    return _lines(n for n in nodes(filename) if isinstance(n, ast.Return))


@functools.cache
def _tried_lines(filename: str) -> frozenset[int]:
    return _lines(s for n in nodes(filename) if isinstance(n, ast.Try) and n.handlers for s in n.body)


@functools.cache
def _writers_lines(filename: str) -> frozenset[int]:
    if not any(map(_WRITING.search, linecache.getlines(filename))):
        return frozenset()
    writing = {n.lineno for n in nodes(filename) if _writes(n)} - error_lines(filename)
    functions = (n for n in nodes(filename) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return _lines(f for f in functions if not writing.isdisjoint(_lines([f])))


def _writes(node: ast.AST) -> TypeGuard[ast.expr]:
    if isinstance(node, ast.Call):
        return called(node) in ("dump", "dumps")
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mod):
        return False
    return isinstance(node.left, ast.Constant) and isinstance(node.left.value, (str, bytes))


def _lines(nodes: Iterable[ast.expr | ast.stmt]) -> frozenset[int]:
    return frozenset(line for n in nodes for line in range(n.lineno, (n.end_lineno or n.lineno) + 1))


def _condition(node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.Assert):
        return node.test
    if isinstance(node, ast.If):
        return node.test if len(node.body) == 1 and isinstance(node.body[0], ast.Raise) else None
    if isinstance(node, ast.Call) and node.args:
        return node.args[0] if called(node) in CHECKERS else None
    return None
