"""The numbers among which running code looks one up: the keys of a dict, the members of a set.

Such a search asks nothing of a number that it does not find. What follows is left to ``numbers``.
"""

from __future__ import annotations

import ast
import dis
import inspect
import itertools
import pathlib
import sys
import types
from typing import Any

from ..code.callees import nodes, written_at
from ..code.spans import span_at

__all__ = ["gathered_at", "sought_among"]

_OURS = str(pathlib.Path(__file__).parents[1])
_GATHERING = ("set", "frozenset", "_count_elements", "fromkeys", "add", "update")
_ASKING = ("get", "pop", "setdefault", "__contains__", "__getitem__")
_NOT_ASKING = ("STORE", "DELETE")


def _running() -> types.FrameType | None:
    """The frame of the code that runs now and is not ours."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame


def gathered_at() -> tuple[types.CodeType, int] | None:
    """The place of the code that runs now, where it gathers keys: how many there are depends on all."""
    frame = _running()
    written = None if frame is None else written_at(frame.f_code, frame.f_lasti)
    if frame is None:
        return None
    called = written.func if isinstance(written, ast.Call) else None
    name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
    is_written_out = isinstance(written, (ast.Set, ast.SetComp, ast.Dict, ast.DictComp))
    return (frame.f_code, frame.f_lasti) if is_written_out or name in _GATHERING else None


def sought_among() -> list[int] | None:
    """The whole numbers in the dict or set that the code which runs now looks into, where it can be told.

    Those within tuples too, of which a number may be a part. None where it asks for a hash as such, or
    makes a set that is one side of what is written there.
    """
    frame = _running()
    if frame is None or dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(_NOT_ASKING):
        return []
    written = written_at(frame.f_code, frame.f_lasti)
    if isinstance(written, ast.Call) and isinstance(written.func, ast.Name) and written.func.id == "hash":
        return None
    if isinstance(written, ast.Set) and _is_a_side(frame):
        return None
    node = written if isinstance(written, ast.Set) else _container(written)
    held: Any = ()
    if isinstance(node, (ast.Dict, ast.Set)):
        keys = node.keys if isinstance(node, ast.Dict) else node.elts
        held = [_key(k, frame) for k in keys]
    elif node is not None:
        found = _value(node, frame)
        held = found if isinstance(found, (dict, set, frozenset)) else ()
    parts = itertools.chain.from_iterable(k if isinstance(k, tuple) else (k,) for k in list(held))
    return [k for k in parts if type(k) is int]


def _is_a_side(frame: types.FrameType) -> bool:
    """Whether what is written where a frame is belongs to an operation, a comparison or a method's call."""
    code = frame.f_code
    line, _, column, _ = span_at(code, frame.f_lasti)
    sides: list[ast.expr] = []
    for node in nodes(code.co_filename):
        if isinstance(node, ast.BinOp):
            sides += [node.left, node.right]
        elif isinstance(node, ast.Compare):
            sides += [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            sides += [node.func.value, *node.args]
    return any((side.lineno, side.col_offset) == (line, column) for side in sides)


def _key(node: ast.expr | None, frame: types.FrameType) -> Any:
    """What a key is that is written out, or has a name; None of others."""
    if isinstance(node, ast.Tuple):
        return tuple(_key(part, frame) for part in node.elts)
    if isinstance(node, ast.Constant):
        return node.value
    return None if node is None else _value(node, frame)


def _container(node: ast.expr | None) -> ast.expr | None:
    """What an expression looks into."""
    if isinstance(node, ast.Subscript):
        return node.value
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        return node.comparators[0]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ASKING:
        return node.func.value
    return None


def _value(node: ast.expr, frame: types.FrameType) -> Any:
    """What names and attributes of them stand for, without running code of theirs."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, frame)
        return None if owner is None else inspect.getattr_static(owner, node.attr, None)
    return None
