"""Numbers that functions make of tensors, inside of code kept whole too, put where that may have a bend.

A loss that is cut off at a level is a mean of rows' until it comes there, and a limit on a norm leaves rows
alone. Asking there whether rows are mixed is left to ``row_questions``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..calls.functions import tensors
from .results import EQUAL, Rows, is_close, is_number

__all__ = ["FAR", "Around", "numbers_elsewhere"]

Around = Callable[[str], contextlib.AbstractContextManager[Any]]
"""The context that a form runs in for rows such as ``"abb"``."""

FAR = (1024.0, 1.0), (1.0, 1 / 1024)
"""What numbers made of rows are taken times for row a and for row b: bends are found above and below."""


class _Numbers(TorchFunctionMode):
    """Notes the numbers that functions make of larger tensors, and may give others in their place."""

    def __init__(self, other: Callable[[int, Tensor], Tensor | None] = lambda place, number: None) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.are_used = False
        self._other = other
        self._made: dict[int, Tensor] = {}  # those, and what is made of them alone

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_made = [id(t) in self._made for t in tensors((args, kwargs or {}))]
        self.are_used |= any(is_made)
        if not isinstance(result, Tensor):
            return result
        if any(is_made) and (is_number(result) or all(is_made)):
            self._made[id(result)] = result
        elif is_number(result) and any(t.numel() > 1 for t in tensors((args, kwargs or {}))):
            self.seen.append(result.detach().clone())
            other = self._other(len(self.seen) - 1, result)
            result = result if other is None else other
            self._made[id(result)] = result
        return result


def numbers_elsewhere(run: Rows) -> tuple[list[Around], list[Around]]:
    """What puts all such numbers of a form further from nought, or nearer; and means of rows' far apart.

    ``run`` runs the form. Both are empty where it makes nothing of such numbers, or more on other rows.
    """
    seen: list[list[Tensor]] = []
    for rows in ("ab", "aa", "bb"):
        with _Numbers() as noted:
            run(rows)
        if not noted.are_used:
            return [], []
        seen.append(noted.seen)
    both, a, b = seen
    if not len(both) == len(a) == len(b):
        return [], []
    means = {
        i: number
        for i, number in enumerate(both)
        if not is_close(a[i], b[i], EQUAL) and is_close(number, (a[i] + b[i]) / 2, EQUAL)
    }

    def scaled(factor: float) -> Around:
        return lambda rows: _Numbers(lambda place, number: number * factor)

    def apart(factors: tuple[float, float]) -> Around:
        def around(rows: str) -> _Numbers:
            factor = sum(factors["ab".index(row)] for row in rows) / len(rows)
            return _Numbers(lambda place, number: means[place] * factor if place in means else None)

        return around

    evenly = [scaled(factor) for factor in (FAR[0][0], FAR[1][1])]
    return evenly, [apart(factors) for factors in FAR if means]
