"""Which of a call's arguments can be written into: found, compared with what they were, put back.

What follows for a recording and for a caller is left to ``writes``.
"""

from __future__ import annotations

import collections
import dataclasses
import types
from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from .contents import SIMPLE, parts
from .structure import Step, attributes, is_leaf

__all__ = ["Holder", "content", "holders"]

_DEEPEST = 6
_DICTS, _LISTS = (dict, UserDict), (list, collections.deque)
_WITH_ITEMS = (*_DICTS, *_LISTS, tuple, set, frozenset)


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """The items or the attributes of a value among a call's arguments, and what they were ``before``.

    ``trail`` are the steps to it, the first of them a name; ``kind`` is that of a step further. One that
    ``is_bare`` is taken by a copy of the arguments as it is.
    """

    trail: tuple[Step, ...]
    kind: Literal["item", "attr"]
    owner: Any
    before: Mapping[Any, Any]
    is_bare: bool

    def changes(self) -> tuple[dict[Any, Any], tuple[Any, ...]]:
        """What is there now and was not, by key, and the keys that are gone."""
        now, before = content(self.owner, self.kind), self.before
        new = {k: v for k, v in now.items() if k not in before or _is_other(before[k], v)}
        return new, tuple(k for k in before if k not in now)

    def put_back(self) -> None:
        """Let it hold what it held."""
        new, gone = self.changes()
        if not (new or gone):
            return
        owner, before = self.owner, self.before
        if self.kind == "attr":
            for name in new.keys() - before.keys():
                object.__delattr__(owner, name)
            for name in (n for n in before if n in new or n in gone):
                object.__setattr__(owner, name, before[name])
        elif isinstance(owner, np.ndarray):
            owner[...] = np.frombuffer(before[...], owner.dtype).reshape(owner.shape)
        elif isinstance(owner, bytearray):
            owner[:] = before[...]
        else:
            owner.clear()
            fill = owner.extend if isinstance(owner, _LISTS) else owner.update
            fill(before if isinstance(owner, _DICTS) else before.values())


def holders(given: Mapping[str, Any]) -> Iterator[Holder]:
    """All in some arguments that can be written into, by every way that leads to it.

    Into what a copy takes as it is, the shortest ways alone lead on: objects may all know one another.
    """
    opened: dict[int, int] = {}
    for name, value in given.items():
        yield from _inside(value, (("item", name),), False, opened)


def _inside(value: Any, trail: tuple[Step, ...], is_bare: bool, opened: dict[int, int]) -> Iterator[Holder]:
    """What a value and all in it are; ``opened`` are ids of bare ones, and how short a way led into each."""
    is_simple = isinstance(value, (*SIMPLE, type, types.ModuleType, torch.Tensor, nn.Module))
    if is_simple or callable(value) or len(trail) > _DEEPEST:
        return
    is_bare = is_bare or is_leaf(value, len(trail))
    is_known = is_bare and opened.get(id(value), _DEEPEST + 1) <= len(trail)
    if is_bare and not is_known:
        opened[id(value)] = len(trail)
    for kind in ("item", "attr"):
        held = content(value, kind)
        if held is None:
            continue
        if kind == "attr" or not isinstance(value, (tuple, frozenset)):
            yield Holder(trail, kind, value, held, is_bare)
        for key, inner in () if is_known else held.items():
            yield from _inside(inner, (*trail, (kind, key)), is_bare, opened)


def content(value: Any, kind: str) -> Any:
    """What a value holds as items by key, or as attributes by name; None where it has no such."""
    if kind == "attr":
        return attributes(value)
    if isinstance(value, _WITH_ITEMS):
        return parts(value)
    if isinstance(value, bytearray):
        return {...: bytes(value)}
    is_array = isinstance(value, np.ndarray) and value.flags.writeable and not value.dtype.hasobject
    return {...: value.tobytes()} if is_array else None


def _is_other(before: Any, now: Any) -> bool:
    return now is not before and not (isinstance(now, bytes) and now == before)
