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

from .callees import written_at

__all__ = ["sought_among"]

_OURS = str(pathlib.Path(__file__).parents[1])
_ASKING = ("get", "pop", "setdefault", "__contains__", "__getitem__")
_NOT_ASKING = ("STORE", "DELETE")


def sought_among() -> list[int] | None:
    """The whole numbers in the dict or set that the code which runs now looks into, where it can be told.

    Those within tuples too, of which a number may be a part. None where it asks for a hash as such.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    if frame is None or dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(_NOT_ASKING):
        return []
    written = written_at(frame.f_code, frame.f_lasti)
    if isinstance(written, ast.Call) and isinstance(written.func, ast.Name) and written.func.id == "hash":
        return None
    node = _container(written)
    held: Any = ()
    if isinstance(node, (ast.Dict, ast.Set)):
        keys = node.keys if isinstance(node, ast.Dict) else node.elts
        held = [_key(k, frame) for k in keys]
    elif node is not None:
        found = _value(node, frame)
        held = found if isinstance(found, (dict, set, frozenset)) else ()
    parts = itertools.chain.from_iterable(k if isinstance(k, tuple) else (k,) for k in list(held))
    return [k for k in parts if type(k) is int]


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
