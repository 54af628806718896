"""Which loaded modules hold values of some kind under names of their own, found at little cost once known.

What is done about them is left to ``memos`` and ``patches``.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

from ...torch_private import dict_version
from .quick_check import are_same

__all__ = ["Spaces"]

_FOREIGN = sys.stdlib_module_names - {"__main__"} | {
    "torch", "numpy", "sympy", "scipy", "networkx", "autopipe", "pytest", "_pytest"
}  # fmt: skip


class Spaces:
    """The namespaces of modules, as long as they were when they were looked through, with what was found.

    Not those of Python, torch and numpy themselves. ``is_wanted`` says what is looked for.
    """

    def __init__(self, is_wanted: Callable[[Any], bool]) -> None:
        self.is_wanted = is_wanted
        self.count: int | None = None
        self.modules: list[Any] = []
        self.spaces: list[dict[str, Any]] = []
        self.lengths: list[int] = []
        self.names: list[tuple[str, ...]] = []
        self.places: tuple[list[dict[str, Any]], list[str]] = [], []
        self.seen: list[Any] = []
        self.last: tuple[tuple[dict[str, Any], str, Any], ...] = ()

    def found(self) -> tuple[tuple[dict[str, Any], str, Any], ...]:
        """(namespace, name, value) of each, the same object as long as nothing is other than it was.

        A namespace that has grown is read again.
        """
        count = None if dict_version is None else dict_version(sys.modules)
        is_counted = count is not None and count == self.count
        is_loaded = not is_counted and not are_same(modules := [*sys.modules.values()], self.modules)
        self.count = count
        if is_loaded:
            self._follow(modules)
        lengths = [*map(dict.__len__, self.spaces)]
        if is_loaded or lengths != self.lengths:
            pairs = zip(lengths, self.lengths, strict=True)
            for i in [i for i, (now, before) in enumerate(pairs) if now != before]:
                self.names[i] = tuple([k for k, v in [*self.spaces[i].items()] if self.is_wanted(v)])
            self.lengths = lengths
            spaces = [s for s, names in zip(self.spaces, self.names, strict=True) for _ in names]
            self.places, self.seen, self.last = (spaces, [*itertools.chain(*self.names)]), [], ()
        seen = [*map(dict.get, *self.places)]
        if not are_same(seen, self.seen):
            found = zip(*self.places, seen, strict=True)
            self.seen, self.last = seen, tuple(place for place in found if self.is_wanted(place[2]))
        return self.last

    def _follow(self, modules: list[Any]) -> None:
        """Modules were loaded, or others put in their place."""
        pairs = zip(self.lengths, self.names, strict=True)
        known = dict(zip(map(id, self.spaces), pairs, strict=True))
        held = [(n, getattr(m, "__dict__", None)) for n, m in [*sys.modules.items()]]
        own = [h for n, h in held if isinstance(h, dict) and n.partition(".")[0] not in _FOREIGN]
        of_each = [known.get(id(space), (-1, ())) for space in own]
        self.modules, self.spaces = modules, own
        self.lengths, self.names = [n for n, _ in of_each], [names for _, names in of_each]
