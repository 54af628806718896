"""Which stages receive a cheap value and which compute it again: exactly, for one assignment of items.

What either costs is said by ``problem``. A stage that computes a value again pays for that alone; its sender
pays where some stage receives it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

__all__ = ["Crossing", "Moving", "Taker", "settle"]

_STEPS = 5_000
"""Choices looked at for one assignment; past them a choice comes with a bound."""


@dataclasses.dataclass(frozen=True, slots=True)
class Taker:
    """A stage that may take a value: what sending it there, receiving it, and computing it again cost."""

    stage: int
    send_ns: int
    receive_ns: int
    again_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class Crossing:
    """A value made in one stage that others receive or compute again."""

    net: int
    source: int
    takers: tuple[Taker, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Moving:
    """What stages pay for the values chosen so far, each by stage."""

    again_ns: tuple[int, ...]
    send_ns: tuple[int, ...]
    receive_ns: tuple[int, ...]

    @classmethod
    def nothing(cls, n_stages: int) -> Moving:
        return cls(*[(0,) * n_stages] * 3)

    def given(self, crossing: Crossing, again: Sequence[bool], once: bool) -> Moving:
        """After the choice of one value's takers that compute it again."""
        redone, sent, received = list(self.again_ns), list(self.send_ns), list(self.receive_ns)
        sends = [0]
        for taker, redo in zip(crossing.takers, again, strict=True):
            if redo:
                redone[taker.stage] += taker.again_ns
            else:
                received[taker.stage] += taker.receive_ns
                sends.append(taker.send_ns)
        sent[crossing.source] += max(sends) if once else sum(sends)
        return Moving(tuple(redone), tuple(sent), tuple(received))


Choice = tuple[tuple[bool, ...], ...]
"""For each crossing, which takers compute it again."""


def settle(
    crossings: Sequence[Crossing], worst: Callable[[Moving], int], n_stages: int, once: bool
) -> tuple[Choice, Moving, int]:
    """The choice with the least ``worst``, which must not fall as prices rise; what stages pay; the least
    ``worst`` that any choice has: its own, unless the search was cut off.

    What costs least in all is tried first, and kept where nothing is better. ``once``: a sender pays once for
    all who receive.
    """
    best: Choice = tuple(_cheapest(c, once) for c in crossings)
    paid = Moving.nothing(n_stages)
    for crossing, again in zip(crossings, best, strict=True):
        paid = paid.given(crossing, again, once)
    value = worst(paid)
    stack: list[tuple[Moving, Choice]] = [(Moving.nothing(n_stages), ())]
    for _ in range(_STEPS):
        if not stack:
            break
        now, chosen = stack.pop()
        least = worst(now)
        if least >= value:
            continue
        if len(chosen) == len(crossings):
            best, paid, value = chosen, now, least
            continue
        crossing = crossings[len(chosen)]
        for again in itertools.product((True, False), repeat=len(crossing.takers)):
            stack.append((now.given(crossing, again, once), (*chosen, again)))
    return best, paid, min([value, *(worst(now) for now, _ in stack)])


def _cheapest(crossing: Crossing, once: bool) -> tuple[bool, ...]:
    """What costs least in all: no one receives, or each does what is cheaper there."""
    each = tuple(t.again_ns < t.receive_ns for t in crossing.takers)
    sends = [0, *(t.send_ns for t, redo in zip(crossing.takers, each, strict=True) if not redo)]
    shipped = sum(min(t.again_ns, t.receive_ns) for t in crossing.takers) + (
        max(sends) if once else sum(sends)
    )
    nobody = (True,) * len(crossing.takers)
    return nobody if sum(t.again_ns for t in crossing.takers) <= shipped else each
