"""Whether a model's own code asks if two of its values are one object, which no graph can tell.

Whether the answer matters is left to ``runs``, holding calls against it to ``arguments``.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
import types
from collections.abc import Iterator

from torch import nn

__all__ = ["compares"]

_IS = dis.opmap["IS_OP"]
_VARIABLES = frozenset(op for name, op in dis.opmap.items() if name.startswith(("LOAD_FAST", "LOAD_DEREF")))
_NAMES = frozenset({"id", "is_", "is_not"})
_CODED = (types.FunctionType, type(functools.lru_cache(lambda: None)))
_HOLDING = (property, staticmethod, classmethod, functools.cached_property, functools.partialmethod)


def compares(model: nn.Module) -> bool:
    """Whether code of the model's classes, or a function of their files, compares variables by identity."""
    classes = {cls for m in model.modules() for cls in type(m).__mro__ if not _is_torchs(cls.__module__)}
    return any(map(_class_compares, classes)) or any(map(_file_compares, {c.__module__ for c in classes}))


def _is_torchs(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "builtins", "typing", "abc")


@functools.lru_cache(maxsize=1 << 10)
def _class_compares(cls: type) -> bool:
    held = itertools.chain.from_iterable(map(_parts, vars(cls).values()))
    return any(map(_code_compares, held))


@functools.lru_cache(maxsize=1 << 8)
def _file_compares(module: str) -> bool:
    known = vars(sys.modules.get(module, types))
    own = (v for v in list(known.values()) if isinstance(v, _CODED) and v.__module__ == module)
    return any(_code_compares(code) for value in own for code in _parts(value))


def _parts(value: object) -> Iterator[types.CodeType]:
    """The code of a function, a method or a property."""
    if not isinstance(value, (*_CODED, *_HOLDING)):
        return
    for name in ("fget", "__func__", "func", "__wrapped__"):
        value = getattr(value, name, value)
    code = getattr(value, "__code__", None)
    if isinstance(code, types.CodeType):
        yield code


def _code_compares(code: types.CodeType) -> bool:
    """Whether ``is`` stands between two variables somewhere in code, or ids are asked for."""
    operations, at = code.co_code[::2], -1
    while (at := operations.find(_IS, at + 1)) >= 0:
        if at and operations[at - 1] in _VARIABLES:
            return True
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return not _NAMES.isdisjoint(code.co_names) or any(map(_code_compares, inner))
