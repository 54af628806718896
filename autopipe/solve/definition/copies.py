"""Which stages receive a cheap value and which compute it again: exactly, for one assignment of items.

What either costs is said by ``problem``. A stage that computes a value again pays for that alone; its sender
pays where some stage receives it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

__all__ = ["Crossing", "Moving", "Taker", "settle"]

_STEPS = 2_000
"""Choices looked at for one assignment; past them a choice comes with a bound."""


@dataclasses.dataclass(frozen=True, slots=True)
class Taker:
    """A stage that may take a value: what sending it there, receiving it, and computing it again cost.

    ``is_far`` says that its message goes to another host.
    """

    stage: int
    send_ns: int
    receive_ns: int
    again_ns: int
    is_far: bool = False


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
    wire_ns: tuple[int, ...]

    @classmethod
    def nothing(cls, n_stages: int) -> Moving:
        return cls(*[(0,) * n_stages] * 4)

    def redone(self, taker: Taker) -> Moving:
        """With a value computed again by one that takes it."""
        return dataclasses.replace(self, again_ns=_plus(self.again_ns, taker.stage, taker.again_ns))

    def received(self, taker: Taker, source: int, send_ns: int) -> Moving:
        """With a value received by one that takes it, which its sender pays so much more for."""
        receive_ns, wire_ns = _plus(self.receive_ns, taker.stage, taker.receive_ns), self.wire_ns
        if taker.is_far:
            wire_ns = _plus(_plus(wire_ns, source, taker.send_ns), taker.stage, taker.receive_ns)
        return Moving(self.again_ns, _plus(self.send_ns, source, send_ns), receive_ns, wire_ns)


def _plus(row: tuple[int, ...], s: int, ns: int) -> tuple[int, ...]:
    return (*row[:s], row[s] + ns, *row[s + 1 :])


Choice = tuple[bool, ...]
"""For each taker of each crossing in turn, whether it computes the value again."""


@dataclasses.dataclass(frozen=True, slots=True)
class _State:
    """The choices made so far, what they cost, and what the sender of the value at hand pays already."""

    paid: Moving
    chosen: Choice = ()
    sent_ns: int = 0

    def then(self, crossing: Crossing, taker: Taker, is_first: bool, again: bool, once: bool) -> _State:
        """After the choice for one more taker."""
        chosen, sent = (*self.chosen, again), 0 if is_first else self.sent_ns
        if again:
            return _State(self.paid.redone(taker), chosen, sent)
        more = max(0, taker.send_ns - sent) if once else taker.send_ns
        return _State(self.paid.received(taker, crossing.source, more), chosen, sent + more)


def settle(
    crossings: Sequence[Crossing], worst: Callable[[Moving], int], n_stages: int, once: bool
) -> tuple[Choice, Moving, int]:
    """The choice with the least ``worst``, which must not fall as prices rise; what stages pay; the least
    ``worst`` that any choice has: its own, unless the search was cut off.

    What costs least in all is tried first, and kept where nothing is better. ``once``: a sender pays once for
    all who receive. Branch and bound, a taker at a time.
    """
    turns = [(c, taker, x == 0) for c in crossings for x, taker in enumerate(c.takers)]
    best = _State(Moving.nothing(n_stages))
    cheapest = [again for c in crossings for again in _cheapest(c, once)]
    for (crossing, taker, is_first), again in zip(turns, cheapest, strict=True):
        best = best.then(crossing, taker, is_first, again, once)
    value = worst(best.paid)
    stack = [_State(Moving.nothing(n_stages))]
    for _ in range(_STEPS):
        if not stack:
            break
        now = stack.pop()
        least = worst(now.paid)
        if least >= value:
            continue
        if len(now.chosen) == len(turns):
            best, value = now, least
            continue
        turn = turns[len(now.chosen)]
        stack += [now.then(*turn, again, once) for again in (True, False)]
    return best.chosen, best.paid, min([value, *(worst(now.paid) for now in stack)])


def _cheapest(crossing: Crossing, once: bool) -> tuple[bool, ...]:
    """What costs least in all: no one receives, or each does what is cheaper there."""
    each = tuple(t.again_ns < t.receive_ns for t in crossing.takers)
    sends = [0, *(t.send_ns for t, redo in zip(crossing.takers, each, strict=True) if not redo)]
    shipped = sum(min(t.again_ns, t.receive_ns) for t in crossing.takers) + (
        max(sends) if once else sum(sends)
    )
    nobody = (True,) * len(crossing.takers)
    return nobody if sum(t.again_ns for t in crossing.takers) <= shipped else each
