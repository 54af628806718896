"""Where a rank is in its work, and how long it may be there.

Who is told of it, and judged by it, is left to ``failure``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

__all__ = ["OUTSIDE", "Doing", "Patience", "Position"]

Doing = tuple[object, int]
"""What a rank does, in words (or prints as such), and the rank it waits for meanwhile, or -1."""

MIN_STALL_S = 60.0
STALL_STEPS = 20.0
FIRST_STEP_FACTOR = 5.0
BUSY_FACTOR = 5.0
"""How much longer a rank that shows life may compute, where the user set no limit: kernels compile again."""
BETWEEN = (-1, -2, -3)
"""What a position's index is before the first step, after one, and in what is done between steps."""
OUTSIDE = -1 << 30
"""What it is while a rank waits for those of other pipelines."""


@dataclasses.dataclass
class Patience:
    """How long a rank may make no progress: the user's limit, or far above the plan's times.

    Longer until ``is_warm``: first steps compile kernels, load libraries and open connections.
    """

    given_s: float | None
    step_s: float
    is_warm: bool = False

    @property
    def busy_factor(self) -> float:
        """How much longer than the limit a rank that computes may take."""
        return 1.0 if self.given_s is not None else BUSY_FACTOR

    @property
    def limit_s(self) -> float:
        if self.given_s is not None:
            return self.given_s
        limit_s = max(MIN_STALL_S, STALL_STEPS * self.step_s)
        return limit_s if self.is_warm else FIRST_STEP_FACTOR * limit_s


@dataclasses.dataclass
class Position:
    """Where a rank is: the step number, the index in its program, and what that is in words.

    ``waits_for`` is the rank it waits for, or -1 while it computes or is in the user's own code, where
    ``is_idle`` is set.
    """

    step: int = 0
    index: int = -1
    words: object = "the user's own code before its first step"
    waits_for: int = -1
    is_idle: bool = False
    _doings: Sequence[Doing] = ()
    _first: int | None = None
    _done: Sequence[Any] = ()
    _n_passed: int = 0
    _after: list[tuple[object, int, Any]] = dataclasses.field(default_factory=list)

    @property
    def is_at_work(self) -> bool:
        """Whether it is within a step, or waits for ranks of other pipelines: not in the user's own code."""
        return self.waits_for < 0 and not self.is_idle and self.index not in BETWEEN

    def follow(self, doings: Sequence[Doing], done: Sequence[Any]) -> None:
        """Take from here on what a rank does from its index, which counts ``doings``; until :meth:`settle`.

        On an accelerator the device's progress is taken from the events in ``done``, as they come: one ahead
        of the first, and one after each.
        """
        self._doings, self._first, self._done = doings, self.index + 1, done
        self._n_passed, self._after = 0, []

    def settle(self) -> None:
        """The host is through with what it followed, or failed there: what it does is said anew from now."""
        self.words, self.waits_for = self._doing()
        self._first = None

    def _doing(self) -> Doing:
        """What the host does, and the rank it waits for."""
        i = -1 if self._first is None else self.index - self._first
        return self._doings[i] if 0 <= i < len(self._doings) else (self.words, self.waits_for)

    def follow_to(self, words: object, waits_for: int, mark: Any) -> None:
        """And then from the event of what comes after them, in which ranks wait for one another."""
        self._after.append((words, waits_for, mark))

    def seen(self) -> Position:
        """Where the device is, while it is behind the host; else where the host is."""
        done, after = self._done, self._after
        n_given = len(done) - 1
        while self._n_passed < n_given and done[self._n_passed + 1].query():
            self._n_passed += 1
        n_passed, index = self._n_passed, self.index
        found: Doing | None = None
        if n_passed < n_given:
            found = self._doings[n_passed]
        for i, (what, peer, mark) in enumerate(after if found is None else ()):
            if not mark.query():
                n_passed, found = n_passed + i, (what, peer)
                break
        if found is None:
            found, is_idle = self._doing(), self.is_idle
        else:
            index, is_idle = -4 - n_passed, False  # the host's own are above
        return dataclasses.replace(self, index=index, words=found[0], waits_for=found[1], is_idle=is_idle)
