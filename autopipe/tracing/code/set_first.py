"""Which attributes of modules a run sets before it reads them: what they held before is of no account to it.

Which attributes a run sets at all is left to ``repeats``, what follows for later calls to ``assumptions``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from ..members import submodule
from .attributes import NOTHING, inherited, put_back
from .leaf_state import codes_of

__all__ = ["Place", "reads_before_sets"]

Place = tuple[str, str]
"""An attribute by the path of its module and its name."""
_ASIDE = frozenset({"__dict__", "vars", "__getstate__", "deepcopy"})
"""Names by which code may come by an attribute without asking for it."""


@contextlib.contextmanager
def reads_before_sets(model: nn.Module, places: Collection[Place]) -> Iterator[set[Place]]:
    """Within it, note which attributes are read before they are set, or may be where none can tell."""
    read: set[Place] = set()
    on_classes: dict[tuple[type, str], dict[int, Place]] = {}
    for path, name in places:
        module = submodule(model, path)
        cls = type(module)
        if hasattr(type(inherited(cls, name)), "__get__") or _may_go_aside(cls):
            read.add((path, name))
        else:
            on_classes.setdefault((cls, name), {})[id(module)] = (path, name)
    with put_back(on_classes):
        for (cls, name), by_module in on_classes.items():
            setattr(cls, name, _Watched(name, inherited(cls, name), by_module, read))
        yield read


def _may_go_aside(cls: type) -> bool:
    return any(not _ASIDE.isdisjoint(code.co_names) for code in codes_of(cls))


class _Watched:
    """Stands on a class for an attribute of its instances, of which those ``waiting`` have not set it yet."""

    def __init__(self, name: str, inherited: Any, waiting: dict[int, Place], read: set[Place]) -> None:
        self.name, self.inherited, self.waiting, self.read = name, inherited, waiting, read

    def __get__(self, owner: nn.Module | None, cls: type) -> Any:
        held = {} if owner is None else vars(owner)
        if id(owner) in self.waiting:
            self.read.add(self.waiting[id(owner)])
        value = held.get(self.name, self.inherited)
        if value is NOTHING:
            raise AttributeError(f"{cls.__name__!r} object has no attribute {self.name!r}")
        return value

    def __set__(self, owner: nn.Module, value: Any) -> None:
        self.waiting.pop(id(owner), None)
        vars(owner)[self.name] = value

    def __delete__(self, owner: nn.Module) -> None:
        if vars(owner).pop(self.name, NOTHING) is NOTHING:
            raise AttributeError(self.name)
