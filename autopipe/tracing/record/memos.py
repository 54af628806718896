"""Functions behind ``functools.lru_cache``: not asked for what the recording tracks, nor left with it.

A cache would answer for a size of this run what it kept of another, and keep what belongs to a recording.
Everything else that is patched meanwhile is left to ``patches``.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..inputs.structure import flatten
from .position import Position
from .spaces import Spaces
from .tracked import TrackedFloat, TrackedInt

__all__ = ["bypassed"]

_KIND = type(functools.lru_cache(lambda: None))
_BOUND = staticmethod, classmethod
_HELD = (_KIND, *_BOUND)


@contextlib.contextmanager
def bypassed(at: Position, model: nn.Module, classes: Iterable[type]) -> Iterator[None]:
    """Cached functions run anew meanwhile where they are given tracked sizes; not torch's own.

    Those in files, the methods of ``classes``, and what the model's modules have in their attributes.
    """
    held = _SPACES.found()
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


_SPACES = Spaces(lambda value: type(value) is _KIND)
