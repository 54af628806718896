"""Whether a leaf keeps something of one call for its next, beside buffers: a potential, a memory, a count.

That its calls then belong together is left to ``opgraph``.
"""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

__all__ = ["Kept", "kept", "reads_another"]

Kept = dict[tuple[int, str], tuple[Any, int]]
"""(id of a module, name) → its value, and how much that holds."""

_OF_ALL = frozenset(vars(nn.Module()))
_SIMPLE = (bool, int, float, str, type(None))


def kept(inside: Sequence[nn.Module]) -> Kept:
    """The plain attributes of some modules."""
    return {
        (id(m), name): (value, len(value) if isinstance(value, (list, dict, set)) else 0)
        for m in inside
        for name, value in vars(m).items()
        if name not in _OF_ALL
    }


def reads_another(before: Kept, inside: Sequence[nn.Module]) -> bool:
    """Whether an attribute that the modules' own code reads has another value by now."""
    classes: dict[int, Any] = {id(m): type(m) for m in inside}
    return any(
        not _is_same(before.get(key, (None, -1)), value) and key[1] in _read(classes[key[0]])
        for key, value in kept(inside).items()
    )


def _is_same(a: tuple[Any, int], b: tuple[Any, int]) -> bool:
    is_equal = isinstance(b[0], _SIMPLE) and type(a[0]) is type(b[0]) and a[0] == b[0]
    return (a[0] is b[0] or is_equal) and a[1] == b[1]


@functools.lru_cache(maxsize=1 << 10)
def _read(cls: Any) -> frozenset[str]:
    """The attributes that the methods of a class and of those it is made of ask for, by name or as a text."""
    own = itertools.takewhile(lambda c: c is not nn.Module, cls.__mro__)
    names: set[str] = set()
    for code in (c for each in own for value in vars(each).values() for c in _codes(value)):
        names.update(i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_ATTR", "LOAD_METHOD"))
        names.update(c for c in code.co_consts if isinstance(c, str))
    return frozenset(names)


def _codes(value: Any) -> Iterator[types.CodeType]:
    """The code of a method, a property or a wrapped one, with that of functions within it."""
    parts = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
    waiting: list[Any] = [getattr(p, "__code__", getattr(p, "__wrapped__", None)) for p in parts]
    while waiting:
        code = waiting.pop()
        code = getattr(code, "__code__", code)
        if isinstance(code, types.CodeType):
            yield code
            waiting += [c for c in code.co_consts if isinstance(c, types.CodeType)]
