"""Numbers that functions make of tensors, inside of code kept whole too, put where that may have a bend.

A loss that is cut off at a level is a mean of rows' until it comes there, and a limit on a norm leaves rows
alone. Asking there whether rows are mixed is left to ``row_questions``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...torch_private import HiddenMode
from ..calls.functions import classify, tensors
from .results import EQUAL, Rows, is_close, is_number

__all__ = ["FAR", "LINEAR", "Around", "Numbers", "in_place_of", "numbers_elsewhere"]

Around = Callable[[str], contextlib.AbstractContextManager[Any]]
"""The context that a form runs in for rows such as ``"abb"``."""

FAR = (1024.0, 1.0), (1.0, 1 / 1024)
"""What numbers made of rows are taken times for row a and for row b: bends are found above and below."""
LINEAR = frozenset({
    "add", "add_", "cat", "clone", "contiguous", "cpu", "detach", "div", "div_", "double", "expand",
    "flatten", "float", "getitem", "iadd", "imul", "isub", "itruediv", "mean", "mul", "mul_", "neg", "output",
    "radd", "reshape", "rsub", "squeeze", "stack", "sub", "sub_", "sum", "to", "truediv", "type_as",
    "unsqueeze", "view",
})  # fmt: skip
"""Functions that give of a mean of numbers the mean of what they give of each. Others may have a bend."""


_PAIR = "ab"


class Numbers(HiddenMode):
    """Notes the numbers that functions make of larger tensors, and may give others in their place.

    Not those made of weights alone, which are the same whatever the rows. They ``may_bend`` where something
    else than numbers that follow them evenly is made of them, or code reads them.
    """

    def __init__(self, other: Callable[[int, Tensor], Tensor | None] = lambda place, number: None) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.firsts: list[set[int]] = []  # how many there are along the first axes of what each is made of
        self.may_bend = False
        self._other = other
        self._made: dict[int, Tensor] = {}  # those, and what is made of them alone

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.with_result(func(*args, **(kwargs or {})), func, args, kwargs)

    def with_result(self, result: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """What takes the place of a function's result."""
        if not (self._made or is_number(result)):
            return result
        given = tensors((args, kwargs or {}))
        is_made = [id(t) in self._made for t in given]
        is_of_them = any(is_made) and isinstance(result, Tensor) and (is_number(result) or all(is_made))
        if any(is_made) and not self.may_bend:
            kind, name = classify(func)
            self.may_bend = kind != "metadata" and not (is_of_them and name.strip("_") in LINEAR)
        if not isinstance(result, Tensor):
            return result
        if is_of_them:
            self._made[id(result)] = result
        elif is_number(result) and any(t.numel() > 1 for t in given) and not _are_weights(given):
            self.seen.append(result.detach().clone())
            self.firsts.append({t.shape[0] for t in given if t.ndim and not isinstance(t, nn.Parameter)})
            other = self._other(len(self.seen) - 1, result)
            result = result if other is None else other
            self._made[id(result)] = result
        return result


def _are_weights(given: Sequence[Tensor]) -> bool:
    return all(isinstance(t, nn.Parameter) for t in given)


@torch.enable_grad()
def in_place_of(number: Tensor, other: Tensor) -> Tensor:
    """The ``other`` number with the gradients of the one whose place it takes: code may ask for these."""
    if not (number.requires_grad and number.isfinite()):
        return other
    return other + (number - number.detach())


def numbers_elsewhere(run: Rows) -> tuple[list[Around], list[Around], list[Around]]:
    """What puts all such numbers of a form further from nought, or nearer; means of rows' far apart; and each
    row's own far from the other's, of which both have the larger, the smaller or a mean, as a loop may ask.

    ``run`` runs the form. All are empty where nothing may bend that it makes of such numbers, or it makes
    more of them on other rows.
    """
    seen: list[list[Tensor]] = []
    for rows in (_PAIR, "aa", "bb"):
        with Numbers() as noted:
            run(rows)
        if not noted.may_bend:
            return [], [], []
        seen.append(noted.seen)
        firsts = noted.firsts
    both, a, b = seen
    if not len(both) == len(a) == len(b):
        return [], [], []
    means = {
        i: number
        for i, number in enumerate(both)
        if not is_close(a[i], b[i], EQUAL) and is_close(number, (a[i] + b[i]) / 2, EQUAL)
    }

    def scaled(factor: float) -> Around:
        return lambda rows: Numbers(lambda place, number: number * factor)

    def apart(factors: tuple[float, float]) -> Around:
        def around(rows: str) -> Numbers:
            factor = sum(factors["ab".index(row)] for row in rows) / len(rows)
            return Numbers(
                lambda place, number: in_place_of(number, means[place] * factor) if place in means else None
            )

        return around

    ways = {
        i: way
        for i, pair in enumerate(zip(a, b, strict=True))
        if (len(_PAIR) in firsts[i] or not is_close(*pair, EQUAL))
        and (way := _way(both[i], torch.stack(pair))) is not None
    }

    def of_each(far: str) -> Around:
        def around(rows: str) -> Numbers:
            def other(place: int, number: Tensor) -> Tensor | None:
                if place not in ways:
                    return None
                own = {row: of[place] * (FAR[0][0] if row == far else 1) for row, of in (("a", a), ("b", b))}
                return in_place_of(number, ways[place](torch.stack([own[row] for row in rows])))

            return Numbers(other)

        return around

    evenly = [scaled(factor) for factor in (FAR[0][0], FAR[1][1])]
    return evenly, [apart(factors) for factors in FAR if means], [of_each(row) for row in _PAIR if ways]


_WAYS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.amax, torch.amin, torch.mean, lambda each: each.square().mean().sqrt(),
)  # fmt: skip
"""What a number of several rows may be of each one's, as a limit on all of them or a norm."""


def _way(both: Tensor, each: Tensor) -> Callable[[Tensor], Tensor] | None:
    return next((way for way in _WAYS if is_close(both, way(each).view_as(both), EQUAL)), None)
