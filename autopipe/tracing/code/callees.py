"""Which function a running piece of code is calling, by the module-level name that it has for it there.

What becomes of the function is left to ``opaque``.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
import types
from typing import Any

from .restart import Function
from .spans import whole_span_at

__all__ = ["callee", "nodes", "written_at"]

_BIT_BY_BIT = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def callee(
    caller: types.FrameType, called: types.FrameType, *, is_held: bool = False
) -> tuple[Function, Any] | None:
    """The function that ``called`` runs, as a name of a module and its value; None where it has none.

    The name is a global one of the caller's file, or of a module that it reaches by names:
    ``self.library.solve`` as well as ``solve``. Of a function that may be one that ``is_held`` by something
    else, it is one of its own file.
    """
    return _by_name(caller, called) or (_held(called) if is_held else None)


def _by_name(caller: types.FrameType, called: types.FrameType) -> tuple[Function, Any] | None:
    name = called.f_code.co_name
    if name in caller.f_code.co_names and _runs(caller.f_globals.get(name), called):
        return Function(caller.f_globals["__name__"], name), caller.f_globals[name]
    written = written_at(caller.f_code, caller.f_lasti)
    node = written.func if isinstance(written, ast.Call) else None
    if isinstance(node, ast.Name) and node.id not in caller.f_locals:
        holder: Any = sys.modules.get(caller.f_globals.get("__name__", ""))
        name = node.id
    elif isinstance(node, ast.Attribute):
        holder, name = _value(node.value, caller), node.attr
    else:
        return None
    if not isinstance(holder, types.ModuleType) or not _runs(value := vars(holder).get(name), called):
        return None
    return Function(holder.__name__, name), value


def _held(called: types.FrameType) -> tuple[Function, Any] | None:
    """A function that its own file has under its name; none that has a closure or is called bit by bit."""
    code, file = called.f_code, called.f_globals.get("__name__", "")
    is_plain = not (code.co_freevars or code.co_flags & _BIT_BY_BIT)
    if not is_plain or vars(sys.modules.get(file, types)) is not called.f_globals:
        return None
    value = called.f_globals.get(code.co_name)
    return (Function(file, code.co_name, is_held=True), value) if _runs(value, called) else None


def _runs(value: Any, frame: types.FrameType) -> bool:
    return isinstance(value, types.FunctionType) and value.__code__ is frame.f_code


@functools.lru_cache(maxsize=1 << 12)
def written_at(code: types.CodeType, at: int) -> ast.expr | None:
    """The expression that a frame of ``code`` is in the middle of, as it is written."""
    if (span := whole_span_at(code, at)) is None:
        return None
    line, end_line, column, end_column = span
    lines = [s.encode() for s in linecache.getlines(code.co_filename)[line - 1 : end_line]]
    if len(lines) != end_line - line + 1:
        return None
    lines[-1] = lines[-1][:end_column]
    lines[0] = lines[0][column:]
    try:
        return ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except SyntaxError:
        return None


def _value(node: ast.expr, frame: types.FrameType) -> Any:
    """What names and attributes of them stand for, without running code of theirs."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, frame), "__dict__", {}).get(node.attr)
    return None


@functools.cache
def nodes(file: str) -> tuple[ast.AST, ...]:
    """All that is written in a file; nothing where it cannot be read."""
    try:
        return tuple(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return ()
