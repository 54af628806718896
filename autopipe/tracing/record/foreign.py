"""Parameters of other layers that a leaf's code uses, by a list, a function, a hook or a global.

A stage that has the leaf would not have those. What is done about it is left to ``recorder``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

__all__ = ["Foreign"]


class Foreign:
    """Notes them while a leaf runs; ``names`` maps ids of the model's parameters to their names."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self.names = names
        self.own: Collection[int] | None = None
        self.found: dict[str, None] = {}

    @contextlib.contextmanager
    def to(self, own: Collection[int]) -> Iterator[dict[str, None]]:
        """Within it parameters are noted by name whose ids are none of ``own``."""
        before, self.own, self.found = (self.own, self.found), own, {}
        try:
            yield self.found
        finally:
            self.own, self.found = before

    def note(self, args: Any, kwargs: Any) -> None:
        """A function of torch is called with these arguments."""
        if self.own is None:
            return
        for value in (*args, *kwargs.values()) if kwargs else args:
            if type(value) is nn.Parameter:
                if id(value) not in self.own and id(value) in self.names:
                    self.found[self.names[id(value)]] = None
            elif type(value) in (tuple, list):
                self.note(value, None)
