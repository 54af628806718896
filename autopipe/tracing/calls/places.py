"""Where values of calls lie in one list, so that calls that run many times find their arguments fast.

Running them is left to ``perform``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from .call import Call, map_calls

__all__ = ["Places"]

_Take = Callable[[Sequence[Any]], tuple[Any, ...]]


class Places:
    """Those of some ``calls``, in order, and behind them of the ``constants`` among what calls are given."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._of = {id(call): i for i, call in enumerate(calls)}
        self.constants: list[Any] = []

    def of(self, call: Call) -> int:
        """Where the value of a call lies."""
        return self._of[id(call)]

    def taking(self, given: Sequence[Any]) -> _Take:
        """What takes arguments, of which each may be a call or hold some, from a list of values."""
        if not all(isinstance(value, Call) or _is_fixed(value) for value in given):
            return lambda values: tuple(map_calls(value, lambda c: values[self.of(c)]) for value in given)
        places = [self.of(value) if isinstance(value, Call) else self._constant(value) for value in given]
        if len(places) > 1:
            return operator.itemgetter(*places)
        return lambda values: tuple([values[place] for place in places])

    def _constant(self, value: Any) -> int:
        self.constants.append(value)
        return len(self._of) + len(self.constants) - 1


def _is_fixed(value: Any) -> bool:
    """Whether a value holds no calls, and nothing that those who are given it may change."""
    if isinstance(value, slice):
        return all(map(_is_fixed, (value.start, value.stop, value.step)))
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return not isinstance(value, (Call, list, dict))
