"""Functions behind ``functools.lru_cache``: not asked for what the recording tracks, nor left with it.

A cache would answer for a size of this run what it kept of another, and keep what belongs to a recording.
Everything else that is patched meanwhile is left to ``patches``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ..inputs.structure import flatten
from .position import Position
from .tracked import TrackedFloat, TrackedInt

__all__ = ["bypassed"]

_KIND = type(functools.lru_cache(lambda: None))
_FOREIGN = sys.stdlib_module_names - {"__main__"} | {
    "torch", "numpy", "sympy", "scipy", "networkx", "autopipe", "pytest", "_pytest"
}  # fmt: skip
_scanned: dict[str, tuple[int, tuple[str, ...]]] = {}
"""By module: how many names it had, and those of cached functions."""


@contextlib.contextmanager
def bypassed(at: Position) -> Iterator[None]:
    """Cached functions run anew meanwhile where they are given tracked sizes; not torch's own."""
    places = [(vars(sys.modules[m]), name) for m, names in _cached() for name in names]
    originals = [(namespace, name, namespace[name]) for namespace, name in places]
    try:
        for namespace, name, original in originals:
            namespace[name] = _Memo(original, at)
        yield
    finally:
        for namespace, name, original in originals:
            namespace[name] = original


class _Memo:
    """Stands in the place of a cached function."""

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

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)


def _is_tracked(value: Any) -> bool:
    if type(value) in (TrackedInt, TrackedFloat):
        return True
    if isinstance(value, (tuple, frozenset)):
        return any(map(_is_tracked, value))
    return False


def _cached() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every module that has cached functions, with their names; looked for again where names were added."""
    for name, module in list(sys.modules.items()):
        root = name.partition(".")[0]
        if module is None or root in _FOREIGN:
            continue
        held = getattr(module, "__dict__", None) or {}
        if _scanned.get(name, (-1, ()))[0] != len(held):
            _scanned[name] = len(held), tuple(k for k, v in list(held.items()) if type(v) is _KIND)
        found = tuple(k for k in _scanned[name][1] if type(held.get(k)) is _KIND)
        if found:
            yield name, found
