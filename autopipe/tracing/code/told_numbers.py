"""Whole numbers that values in code tell, in whatever words: these may be what it asks a size to be.

Finding the values is left to ``own_code``, running code for so many rows to ``rows``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn, strided

__all__ = ["told_numbers"]

_MOST_INSIDE = 64
"""So many values are looked at in one list, dict or table."""
_MOST_TURNS, _MOST_PLACES = 8, 1 << 10
_MOST_LETTERS = 24
"""Longer texts are messages."""


def told_numbers(value: Any) -> Iterator[int]:
    """The number itself, or in a text; ends of a range, items and keys; where a table's numbers change.

    Of a float the whole part.
    """
    if isinstance(value, (bool, type(None))):
        return
    if isinstance(value, int):
        yield value
    elif isinstance(value, float):
        yield from (int(value),) if abs(value) < 1 << 31 else ()
    elif isinstance(value, str):
        yield from map(int, re.findall(r"\d{1,6}", value)) if len(value) <= _MOST_LETTERS else ()
    elif isinstance(value, range):
        yield from (value.start, value.stop, value.step)
    elif isinstance(value, dict):
        yield from itertools.chain(*map(told_numbers, _few([*value][:_MOST_INSIDE])))
        yield from itertools.chain(*map(told_numbers, _few([*value.values()][:_MOST_INSIDE])))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from itertools.chain(*map(told_numbers, _few([*value][:_MOST_INSIDE])))
        yield from _turns(value) if isinstance(value, (list, tuple)) else ()
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        yield from _of_table(value)
    elif type(value) in (Tensor, nn.Parameter) and value.layout is strided and not value.is_meta:
        yield from _of_table(value.detach())


def _few(held: Sequence[Any]) -> Iterator[Any]:
    """Those of the values that are no lists themselves."""
    return (each for each in held if isinstance(each, (int, float, str, range)))


def _of_table(table: Any) -> Iterator[int]:
    """Of one number that; of a row of them the places."""
    if table.ndim == 0:
        yield from told_numbers(table.item())
    elif table.ndim == 1:
        yield from _turns(table[:_MOST_PLACES].tolist())


def _turns(table: Sequence[Any]) -> Iterator[int]:
    """The places at which a table of numbers holds another one than just ahead; one where these are many."""
    if all(isinstance(each, (int, float)) for each in table):
        turns = [i for i, (a, b) in enumerate(itertools.pairwise(table), 1) if a != b]
        yield from turns if len(turns) <= _MOST_TURNS else turns[2:3]
