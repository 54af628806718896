"""Iterators that a model holds, put aside while it is recorded: what is taken from one is gone.

Finding them is left to ``reach``.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ...errors import CaptureError
from ..members import modules_in
from .cells import content
from .reach import Reached

__all__ = ["Spent"]


class Spent:
    """Iterators that a model holds, put aside since they cannot be wound back; who wants an item is told."""

    def __init__(self, model: nn.Module, found: Reached) -> None:
        self.names = {id(i): name for _, name, i in found.exhaustible}
        self.put: list[Callable[[], None]] = []
        if not self.names:
            return
        holders = [*(vars(m) for _, m in modules_in(model)), *(h for _, _, h in found.holders)]
        held = itertools.chain.from_iterable(h.values() if isinstance(h, dict) else h for h in holders)
        if not self._are_apart(held):  # as those of files alone, which are many
            for holder in holders:
                self._aside(holder)
        for _, _, known, _ in found.files:
            self._aside(known)
        for cls in (c for *_, c in found.classes if not self._are_apart(vars(c).values())):
            for key, value in [(k, v) for k, v in vars(cls).items() if id(v) in self.names]:
                setattr(cls, key, self._refusing(value))
                self.put.append(functools.partial(setattr, cls, key, value))
        for _, _, cell in found.cells:
            if id(value := content(cell)) in self.names:
                cell.cell_contents = self._refusing(value)
                self.put.append(functools.partial(setattr, cell, "cell_contents", value))

    def _are_apart(self, held: Iterable[Any]) -> bool:
        """Whether none of the iterators is among what something holds."""
        return self.names.keys().isdisjoint(map(id, held))

    def _aside(self, holder: Any) -> None:
        """Put aside what a mutable container holds."""
        if not isinstance(holder, (dict, list, collections.deque)):
            return
        if self._are_apart(holder.values() if isinstance(holder, dict) else holder):
            return
        for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            if id(value) in self.names:
                holder[key] = self._refusing(value)
                self.put.append(functools.partial(holder.__setitem__, key, value))

    def _refusing(self, value: Any) -> _Refusing:
        return _Refusing(self.names[id(value)], type(value).__name__)

    def put_back(self) -> None:
        for put in self.put:
            put()


class _Refusing:
    """Stands in the place of an iterator."""

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind

    def __iter__(self) -> _Refusing:
        return self

    def __next__(self) -> Any:
        raise CaptureError(
            f"{self.name} is a {self.kind} that a forward takes items from, so that what a call does depends "
            "on how many came before; hold a list, and the place in it in a buffer"
        )
