"""Numbers made of sizes that C reads out of sight, found by runs in which it reads other numbers there.

Where a size indexes a list, or a float is multiplied by one, no code of Python's is called that could leave a
guard. A run whose numbers are shifted where only C looks is recorded alike, unless something went by them.
The runs are left to ``runs``, what follows to ``session``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Set
from typing import Any

import numpy as np
import torch

from ..calls.call import Call, Recording
from ..calls.likeness import is_equal, is_same, prune
from ..calls.named import Named
from .checks import is_in_writer
from .numbers import Numbers
from .tracked import Expression, pinned

__all__ = ["Settling", "Shift", "Tried", "is_alike", "longest_of", "misread"]

_BY = 1009
"""More than the places of most lists; few enough for a loop."""
_MOST = 8
"""How many lines are told apart; with more, all numbers are held to be read."""


class Shift:
    """Adds to the numbers that lines make: to those of the lines ``only``, of all lines but the ``spared``.

    A recording that is longer than ``most`` calls is given up: it may not end.
    """

    def __init__(self, spared: Collection[str], most: int, only: Collection[str] | None = None) -> None:
        self.spared, self.most, self.only = spared, most, only
        self.met: dict[str, None] = {}

    def __call__(self, numbers: Numbers, expression: Expression) -> int:
        line = numbers.at.source()
        self.met[line] = None
        is_meant = self.only is None or line in self.only
        return _BY if is_meant and line not in self.spared else 0


class Settling:
    """Lets the numbers that some ``lines`` make stay as they are at other sizes, or the sizes be refused."""

    def __init__(self, lines: Collection[str]) -> None:
        self.lines = lines

    def __call__(self, numbers: Numbers, expression: Expression) -> int:
        if numbers.recording and numbers.at.source() in self.lines:
            numbers.guard(Expression(pinned, (expression,), expression.value), expression.value)
        return 0


@dataclasses.dataclass(frozen=True, slots=True)
class Tried:
    """What a run with a shift gave; None where it failed."""

    shift: Shift
    found: Recording | None


def longest_of(known: Recording) -> int:
    """How many calls a run with shifted numbers may take."""
    return 2 * len(known.calls)


def is_alike(a: Recording, b: Recording) -> bool:
    """Whether two recordings are one, with what Python asked of sizes and data on the way."""

    def asked(of: Recording) -> list[Any]:
        guards = [(g.function, g.outcome, g.path, g.source) for g in of.guards]
        return [*guards, *((b.outcome, b.source) for b in of.branches), *of.asked, of.dtypes, *of.flags]

    return asked(a) == asked(b) and is_same(prune(a), prune(b)) and _holds_no_more(a, b)


def _holds_no_more(a: Recording, b: Recording) -> bool:
    """Whether a recording holds no object that the other does not: one just made may hold numbers."""
    targets, held = {id(_called(c)) for c in _all_calls(b)}, [*b.constants.values()]
    is_known = all(isinstance(c.target, str) or id(_called(c)) in targets for c in _all_calls(a))
    return is_known and all(any(_is_one(v, w) for w in held) for v in a.constants.values())


def _all_calls(of: Recording) -> list[Call]:
    return [*of.calls, *(c for b in of.branches for c in b.calls)]


def _called(call: Call) -> Any:
    return call.target.function if type(call.target) is Named else call.target


def _is_one(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, (torch.Tensor, np.ndarray)) and is_equal(a, b))


def misread(
    run: Callable[[Shift], Recording | None],
    known: Recording,
    settled: Set[str],
    tried: Tried | None = None,
) -> frozenset[str]:
    """The lines that make numbers which C reads and the recording goes by, beside those ``settled``.

    Also those in functions that write numbers into a text, since a text may be sought among others.
    ``run`` records the same once more; None where it cannot. Where it was ``tried`` with all numbers shifted,
    it is not again. Nothing is said of a model that is recorded otherwise each time.
    """
    expected, most = prune(known), longest_of(known)

    def is_expected(found: Recording | None) -> bool:
        return found is not None and (found is known or is_same(prune(found), expected))

    def is_alike(shift: Shift) -> bool:
        return is_expected(run(shift))

    if tried is None or tried.shift.most < most:
        shift = Shift(settled, most)
        tried = Tried(shift, run(shift))
    everything = tried.shift
    if is_expected(tried.found):
        return frozenset(filter(is_in_writer, everything.met.keys() - settled))
    natural = Shift(settled, most, ())
    if not is_alike(natural):
        return frozenset()
    left = [line for line in natural.met if line not in settled]
    found: set[str] = set()
    while left and len(found) < _MOST:
        found.add(_first_read(left, lambda lines: is_alike(Shift(settled, most, lines))))
        left = [line for line in left if line not in found]
        if is_alike(Shift(settled, most, left)):
            return frozenset(found)
    return frozenset((*found, *left))


def _first_read(lines: list[str], is_alike: Callable[[list[str]], bool]) -> str:
    """The line by which, added to those before it, the recording is another."""
    low, high = 0, len(lines)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_alike(lines[:middle]) else (low, middle)
    return lines[high - 1]
