"""``int()`` and ``float()`` in a model's own code, followed where they are given numbers of a recording.

Both are types, whose calls give plain numbers whatever the argument says of itself. So a file that casts a
tracked number is recorded again with others under these names, where it does nothing with them but call them,
have them called (``map(int, …)``, ``type=float`` of an option) and ask ``isinstance``. What tracked numbers
are is left to ``tracked``.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import os
import pathlib
import sys
import types
from collections.abc import Collection, Iterator
from typing import Any

import torch

from ..code.callees import nodes
from ..code.position import Position
from .tracked import TrackedFloat, TrackedInt, call

__all__ = ["followed", "module_casting"]

NAMES = ("int", "float")
_CALLING = ("defaultdict", "filter", "map")
"""Functions that call what they are given first."""
_CALLED = ("default_factory", "key", "type")
"""Names of arguments that are called."""
_OTHERS = (f"{pathlib.Path(__file__).parents[1]}{os.sep}", f"{pathlib.Path(torch.__file__).parent}{os.sep}")


def module_casting(name: str) -> str | None:
    """The module whose code now calls ``name(number)``, where its casts can be followed and are not yet.

    To be asked by the method that the type calls, whose caller is then that code.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OTHERS):
        frame = frame.f_back
    if frame is None:
        return None
    module = frame.f_globals.get("__name__", "")
    is_builtin = not any(name in scope for scope in (frame.f_locals, frame.f_globals))
    is_module = vars(sys.modules.get(module, types)) is frame.f_globals
    if not is_builtin or not is_module:
        return None
    file = frame.f_code.co_filename
    return module if frame.f_lineno in _casts(file, name) and _only_cast(file) else None


@contextlib.contextmanager
def followed(modules: Collection[str], at: Position, *, of_tensors: bool) -> Iterator[None]:
    """Casts in the code of ``modules`` keep what they are told of numbers, or ``of_tensors``, meanwhile."""
    namespaces = [vars(sys.modules[m]) for m in modules]
    try:
        for namespace in namespaces:
            namespace.update({n: _following(getattr(builtins, n), at, of_tensors) for n in NAMES})
        yield
    finally:
        for namespace in namespaces:
            for name in NAMES:
                namespace.pop(name, None)


def _following(original: type, at: Position, of_tensors: bool) -> Any:
    """What stands in the place of ``int`` or ``float``: as that, but for recorded numbers and tensors."""

    def is_number(value: Any) -> bool:
        is_tensor = of_tensors and isinstance(value, torch.Tensor)
        return is_tensor and value.numel() == 1 and not value.is_complex()

    class Standing(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, original)

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, original)

        def __getattr__(cls, name: str) -> Any:
            return getattr(original, name)

    class Cast(metaclass=Standing):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if not at.is_recorded or len(args) != 1 or kwargs:
                return original(*args, **kwargs)
            value = args[0]
            if is_number(value):
                value = value.item()
            if type(value) not in (TrackedInt, TrackedFloat):
                return original(value)
            return value if type(value) is _KEPT[original] else call(original, value)

    Cast.__name__ = Cast.__qualname__ = original.__name__
    return Cast


_KEPT = {int: TrackedInt, float: TrackedFloat}


@functools.cache
def _casts(file: str, name: str) -> frozenset[int]:
    """The lines of calls of ``name`` in a file."""
    calls = (n for n in nodes(file) if isinstance(n, ast.Call) and _is_name(n.func, (name,)))
    return frozenset(line for n in calls for line in range(n.lineno, (n.end_lineno or n.lineno) + 1))


@functools.cache
def _only_cast(file: str) -> bool:
    """Whether functions of a file only cast with ``int`` and ``float``, ask ``isinstance`` and annotate.

    What else calls them casts as well.
    """
    allowed: set[int] = set()
    for node in nodes(file):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            asked = node.args[1:] if name in ("isinstance", "issubclass") else ()
            kept = [node.func, *asked]
            called = [*node.args[: name in _CALLING], *(k.value for k in node.keywords if k.arg in _CALLED)]
            allowed.update(map(id, called))
        else:
            kept = [*filter(None, (getattr(node, "annotation", None), getattr(node, "returns", None)))]
        allowed.update(id(inner) for k in kept for inner in ast.walk(k))
    bodies = (n.body for n in nodes(file) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    run = (inner for body in bodies for statement in body for inner in ast.walk(statement))
    return all(id(n) in allowed for n in run if _is_name(n, NAMES))


def _is_name(node: ast.AST, names: Collection[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names
