"""Functions behind ``functools.lru_cache``: not asked for what the recording tracks, nor left with it.

A cache would answer for a size of this run what it kept of another, and keep what belongs to a recording.
Everything else that is patched meanwhile is left to ``patches``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..inputs.structure import flatten
from .glance import are_same
from .position import Position
from .tracked import TrackedFloat, TrackedInt

__all__ = ["bypassed"]

_KIND = type(functools.lru_cache(lambda: None))
_BOUND = staticmethod, classmethod
_HELD = (_KIND, *_BOUND)
_FOREIGN = sys.stdlib_module_names - {"__main__"} | {
    "torch", "numpy", "sympy", "scipy", "networkx", "autopipe", "pytest", "_pytest"
}  # fmt: skip


@contextlib.contextmanager
def bypassed(at: Position, model: nn.Module, classes: Iterable[type]) -> Iterator[None]:
    """Cached functions run anew meanwhile where they are given tracked sizes; not torch's own.

    Those in files, the methods of ``classes``, and what the model's modules have in their attributes.
    """
    held = [(space, name, space[name]) for space, names in _SCAN.cached() for name in names]
    held += [(vars(m), k, v) for m in model.modules() for k, v in vars(m).items() if type(v) is _KIND]
    among = ((cls, k, v) for cls in classes for k, v in vars(cls).items() if type(v) in _HELD)
    methods = [(cls, k, v) for cls, k, v in among if type(_function_of(v)) is _KIND]
    try:
        for namespace, name, original in held:
            namespace[name] = _Memo(original, at)
        for cls, name, original in methods:
            memo = _Memo(_function_of(original), at)
            setattr(cls, name, type(original)(memo) if isinstance(original, _BOUND) else memo)
        yield
    finally:
        for namespace, name, original in held:
            namespace[name] = original
        for cls, name, original in methods:
            setattr(cls, name, original)


def _function_of(value: Any) -> Any:
    """What a static or class method wraps; anything else as it is."""
    return value.__func__ if isinstance(value, _BOUND) else value


class _Memo:
    """Stands in the place of a cached function."""

    __slots__ = ("at", "function")

    def __init__(self, function: Any, at: Position) -> None:
        self.function, self.at = function, at

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.at.is_recorded:
            return self.function(*args, **kwargs)
        if _is_tracked((args, tuple(kwargs.values()))):
            return self.function.__wrapped__(*args, **kwargs)
        n_kept = self.function.cache_info().currsize
        result = self.function(*args, **kwargs)
        is_new = self.function.cache_info().currsize > n_kept
        if is_new and any(isinstance(v, torch.Tensor) for v in flatten(result)[0]):
            self.function.cache_clear()  # it was made in this recording and means nothing to the next
        return result

    def __get__(self, owner: Any, cls: type | None = None) -> Any:
        return self if owner is None else types.MethodType(self, owner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)


def _is_tracked(value: Any) -> bool:
    if type(value) in (TrackedInt, TrackedFloat):
        return True
    if isinstance(value, (tuple, frozenset)):
        return any(map(_is_tracked, value))
    return False


class _Scan:
    """The namespaces of modules, as long as they were when they were looked through, with what was found."""

    def __init__(self) -> None:
        self.modules: list[Any] = []
        self.spaces: list[dict[str, Any]] = []
        self.lengths: list[int] = []
        self.names: list[tuple[str, ...]] = []

    def cached(self) -> list[tuple[dict[str, Any], list[str]]]:
        """Every namespace that has cached functions, with their names; one that has grown is read again."""
        if not are_same(modules := [*sys.modules.values()], self.modules):
            self._follow(modules)
        lengths = [*map(dict.__len__, self.spaces)]
        if lengths != self.lengths:
            pairs = zip(lengths, self.lengths, strict=True)
            for i in [i for i, (now, before) in enumerate(pairs) if now != before]:
                self.names[i] = tuple([k for k, v in [*self.spaces[i].items()] if type(v) is _KIND])
            self.lengths = lengths
        found = [(space, names) for space, names in zip(self.spaces, self.names, strict=True) if names]
        return [(space, [k for k in names if type(space.get(k)) is _KIND]) for space, names in found]

    def _follow(self, modules: list[Any]) -> None:
        """Modules were loaded, or others put in their place."""
        pairs = zip(self.lengths, self.names, strict=True)
        known = dict(zip(map(id, self.spaces), pairs, strict=True))
        held = [(n, getattr(m, "__dict__", None)) for n, m in [*sys.modules.items()]]
        own = [h for n, h in held if isinstance(h, dict) and n.partition(".")[0] not in _FOREIGN]
        of_each = [known.get(id(space), (-1, ())) for space in own]
        self.modules, self.spaces = modules, own
        self.lengths, self.names = [n for n, _ in of_each], [names for _, names in of_each]


_SCAN = _Scan()
