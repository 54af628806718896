"""Numbers made of sizes that C code reads unseen, found by runs in which it reads other numbers there.

Where a size indexes a list, or a float is multiplied by one, no code of Python's is called that could leave a
guard. A run whose numbers are shifted where only C looks is recorded alike, unless something went by them.
The runs are left to ``runs``, what follows to ``session``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Set
from typing import Any, NamedTuple

import numpy as np
import torch

from ..calls.call import Call, Recording
from ..calls.likeness import is_equal, is_same, prune
from ..calls.named import unnamed
from ..code.checks import is_in_writer
from ..values.numbers import Numbers, TensorMethod
from ..values.tracked import Expression, pinned

__all__ = ["NumberSource", "Settling", "Shift", "Tried", "is_alike", "longest_of", "misread"]

_BY = 1009
"""More than the places of most lists; few enough for a loop."""
_MOST = 16
"""How many are told apart; with more, all numbers are held to be read."""


class NumberSource(NamedTuple):
    """Where a number is made: by which line and, of a tensor's sizes, along which axis."""

    line: str
    axis: int | None

    @classmethod
    def by(cls, numbers: Numbers, expression: Expression) -> NumberSource:
        """Where a number is being made."""
        is_size = isinstance(expression.function, TensorMethod) and expression.function.name == "size"
        return cls(numbers.at.source(), expression.operands[1] if is_size else None)


class Shift:
    """Adds to the numbers that are made: to ``only`` some, to all but the ``spared``.

    A recording that is longer than ``most`` calls is given up: it may not end.
    """

    def __init__(
        self, spared: Collection[NumberSource], most: int, only: Collection[NumberSource] | None = None
    ) -> None:
        self.spared, self.most, self.only = spared, most, only
        self.met: dict[NumberSource, None] = {}

    def __call__(self, numbers: Numbers, expression: Expression) -> int:
        made = NumberSource.by(numbers, expression)
        self.met[made] = None
        is_meant = self.only is None or made in self.only
        return _BY if is_meant and made not in self.spared else 0


class Settling:
    """Lets the numbers ``made`` in some places stay as they are at other sizes, or the sizes be refused."""

    def __init__(self, made: Collection[NumberSource]) -> None:
        self.made = made

    def __call__(self, numbers: Numbers, expression: Expression) -> int:
        if numbers.recording and NumberSource.by(numbers, expression) in self.made:
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
    targets, held = {id(unnamed(c.target)) for c in _all_calls(b)}, [*b.constants.values()]
    is_known = all(isinstance(c.target, str) or id(unnamed(c.target)) in targets for c in _all_calls(a))
    return is_known and all(any(_is_one(v, w) for w in held) for v in a.constants.values())


def _all_calls(of: Recording) -> list[Call]:
    return [*of.calls, *(c for b in of.branches for c in b.calls)]


def _is_one(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, (torch.Tensor, np.ndarray)) and is_equal(a, b))


def misread(
    run: Callable[[Shift], Recording | None],
    known: Recording,
    settled: Set[NumberSource],
    tried: Tried | None = None,
) -> frozenset[NumberSource]:
    """Where numbers are made which C reads and the recording goes by, beside those ``settled``.

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
        return frozenset(made for made in everything.met.keys() - settled if is_in_writer(made.line))
    natural = Shift(settled, most, ())
    if not is_alike(natural):
        return frozenset()
    left = [made for made in natural.met if made not in settled]
    found: set[NumberSource] = set()
    while left and len(found) < _MOST:
        found.add(_first_read(left, lambda some: is_alike(Shift(settled, most, some))))
        left = [made for made in left if made not in found]
        if is_alike(Shift(settled, most, left)):
            return frozenset(found)
    return frozenset((*found, *left))


def _first_read(made: list[NumberSource], is_alike: Callable[[list[NumberSource]], bool]) -> NumberSource:
    """The place by which, added to those before it, the recording is another."""
    low, high = 0, len(made)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_alike(made[:middle]) else (low, middle)
    return made[high - 1]
