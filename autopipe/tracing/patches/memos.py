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

from ..code.position import Position
from ..inputs.structure import flatten
from ..members import modules_in
from ..state.namespaces import Spaces
from ..values.tracked import TrackedFloat, TrackedInt

__all__ = ["Memos"]

_KIND = type(functools.lru_cache(lambda: None))
_BOUND = staticmethod, classmethod
_HELD = (_KIND, *_BOUND)


class Memos:
    """What stands in the places of cached functions while a model is recorded; not of torch's own.

    They run anew where they are given tracked sizes: those in files, the methods of ``classes``, and what the
    model's modules have in their attributes.
    """

    def __init__(self, model: nn.Module, classes: Iterable[type]) -> None:
        own = ((vars(m), k, v) for _, m in modules_in(model) for k, v in vars(m).items() if type(v) is _KIND)
        self.own = [(space, name, held, _Memo(held)) for space, name, held in own]
        among = ((cls, k, v) for cls in classes for k, v in vars(cls).items() if type(v) in _HELD)
        methods = [(cls, k, v) for cls, k, v in among if type(_function_of(v)) is _KIND]
        self.methods = [(cls, name, held, _method(held)) for cls, name, held in methods]

    @contextlib.contextmanager
    def bypassed(self, at: Position) -> Iterator[None]:
        """Within it they stand there, for what is recorded ``at`` a position."""
        places = [*_in_files(), *self.own]
        _recorded_at.append(at)
        try:
            for space, name, _, memo in places:
                space[name] = memo
            for cls, name, _, method in self.methods:
                setattr(cls, name, method)
            yield
        finally:
            for space, name, held, _ in places:
                space[name] = held
            for cls, name, held, _ in self.methods:
                setattr(cls, name, held)
            _recorded_at.pop()


_recorded_at: list[Position] = []
"""Where what is recorded now is, the latest last."""


def _method(held: Any) -> Any:
    memo = _Memo(_function_of(held))
    return type(held)(memo) if isinstance(held, _BOUND) else memo


def _function_of(value: Any) -> Any:
    """What a static or class method wraps; anything else as it is."""
    return value.__func__ if isinstance(value, _BOUND) else value


class _Memo:
    """Stands in the place of a cached function."""

    __slots__ = ("function",)

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (_recorded_at and _recorded_at[-1].is_recorded):
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


_Places = tuple[tuple[dict[str, Any], str, Any, _Memo], ...]
_known: list[tuple[Any, _Places]] = []
"""What was found in files when it was last looked for, and with what stands in its place."""


def _in_files() -> _Places:
    """The cached functions in files with what stands in their places, made anew where others are there."""
    found = _SPACES.found()
    if not (_known and _known[0][0] is found):
        _known[:] = [(found, tuple((space, name, held, _Memo(held)) for space, name, held in found))]
    return _known[0][1]
