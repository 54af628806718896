"""What a forward writes into the dicts, lists and objects that it is given: seen, and written for a caller.

Its writes to tensors themselves are left to ``recorder``, dicts that leaves fill to ``filling``.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ...errors import CaptureError
from .arguments import arguments, shown
from .contents import SIMPLE, parts
from .structure import Spec, Step, pieces

__all__ = ["Written", "called", "names_written", "write_back"]

_DEEPEST = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A dict, a list or an object among the arguments: the steps to it, the first of them a name.

    ``kind`` is that of a step further; ``gone`` are the keys that a forward takes away there.
    """

    trail: tuple[Step, ...]
    kind: str
    gone: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Written:
    """What a model returns, and what it writes into its arguments: the values that are new by key."""

    result: Any
    changes: Mapping[Place, Mapping[Any, Any]]


def called(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``model`` returns, as :class:`Written` where it writes into its arguments.

    Raises :class:`CaptureError` where it writes into an object that holds no tensors, of which no copy was
    made; that is put back.
    """
    held = [*_containers(arguments(model, args, kwargs))]
    result = model(*args, **kwargs)
    changes = {}
    for trail, container, before, is_bare in held:
        now = parts(container) or {}
        new = {k: v for k, v in now.items() if k not in before or before[k] is not v}
        gone = tuple(k for k in before if k not in now)
        if not (new or gone):
            continue
        if is_bare:
            own: dict[str, Any] = container.__dict__
            own.clear()
            own.update(before)
            raise CaptureError(
                f"{type(model).__name__}'s forward writes {next(iter((*new, *gone)))!r} into its argument "
                f"{shown(trail)}, a {type(container).__name__} in which no tensor is given; return what it "
                "writes, or give it a dict"
            )
        changes[Place(trail, _step(container), gone)] = new
    return Written(result, changes) if changes else result


def write_back(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], written: Written) -> None:
    """Write into the arguments of a call what the model would."""
    given = arguments(model, args, kwargs)
    found = [(_at(given, place.trail), place.gone, new) for place, new in written.changes.items()]
    for container, gone, new in found:
        if isinstance(container, list):
            del container[len(container) - len(gone) :]
            for key, value in new.items():
                container[key : key + 1] = [value]
            continue
        items = container if isinstance(container, (dict, UserDict)) else vars(container)
        for key in gone:
            del items[key]
        items.update(new)


def names_written(output: Spec) -> list[str]:
    """What a forward with this output writes or takes away, as a person would write it: ``batch['h']``."""
    if output.type is not Written:
        return []
    changes = output.children[1]
    return [
        shown((*place.trail, (place.kind, key)))
        for place, new in zip(changes.keys, changes.children, strict=True)
        for key in (*new.keys, *place.gone)
    ]


_Held = tuple[tuple[Step, ...], Any, dict[Any, Any], bool]


def _containers(given: Mapping[str, Any]) -> Iterator[_Held]:
    """All in some arguments that can be written into: the steps to it, itself, what it holds, and whether it
    is an object that arguments are not taken apart at.
    """
    for name, value in given.items():
        yield from _inside(value, (("item", name),))


def _inside(value: Any, trail: tuple[Step, ...]) -> Iterator[_Held]:
    leaves = *SIMPLE, type, torch.Tensor, nn.Module, set, frozenset, np.ndarray
    is_leaf = isinstance(value, leaves) or callable(value)
    is_open = _step(value) == "item" or hasattr(value, "__dict__")
    if is_leaf or not is_open or len(trail) > _DEEPEST:
        return
    held, is_bare = parts(value) or {}, _step(value) == "attr" and not pieces(value)
    if not isinstance(value, tuple):
        yield trail, value, held, is_bare
    for key, inner in () if is_bare else held.items():
        yield from _inside(inner, (*trail, (_step(value), key)))


def _step(container: Any) -> Any:
    return "item" if isinstance(container, (dict, UserDict, list, tuple)) else "attr"


def _at(given: Mapping[str, Any], trail: tuple[Step, ...]) -> Any:
    found: Any = given
    for kind, key in trail:
        found = found[key] if kind == "item" else vars(found)[key]
    return found
