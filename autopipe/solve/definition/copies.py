"""Which stages receive a cheap value and which compute it again: exactly, for one assignment of items.

What either costs is said by ``problem``. A stage that computes a value again pays for that alone, and has no
buffers for it; its sender pays, and has one, where some stage receives it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .pieces import HUGE

__all__ = ["Crossing", "Moved", "Moving", "Priced", "Taker", "settle"]

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
    """A value made in one stage that others receive or compute again.

    ``n_bytes`` is it itself, ``sent_bytes`` its sender's buffer once anyone receives it, and
    ``workspace_bytes`` what computing it again needs.
    """

    net: int
    source: int
    takers: tuple[Taker, ...]
    n_bytes: int = 0
    sent_bytes: int = 0
    workspace_bytes: int = 0


class Moved(NamedTuple):
    """What one stage has of the values chosen so far."""

    again_ns: int = 0
    send_ns: int = 0
    receive_ns: int = 0
    wire_ns: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    workspace_bytes: int = 0


Moving = tuple[Moved, ...]
"""What each stage has of the values chosen so far."""

Choice = tuple[bool, ...]
"""For each taker of each crossing in turn, whether it computes the value again."""

Priced = tuple[int, int]
"""What moving so comes to, and the least that it may: less where a search within was cut off."""


@dataclasses.dataclass(frozen=True, slots=True)
class _State:
    """The choices made so far, what they cost, and what the sender of the value at hand pays already.

    ``sent_ns`` is −1 as long as no one receives it.
    """

    paid: Moving
    chosen: Choice = ()
    sent_ns: int = -1

    def then(self, crossing: Crossing, taker: Taker, is_first: bool, again: bool, once: bool) -> _State:
        """After the choice for one more taker."""
        chosen, sent = (*self.chosen, again), -1 if is_first else self.sent_ns
        if again:
            return _State(_redone(self.paid, crossing, taker), chosen, sent)
        more = max(0, taker.send_ns - max(0, sent)) if once else taker.send_ns
        paid = _received(self.paid, crossing, taker, more, is_first=sent < 0)
        return _State(paid, chosen, max(0, sent) + more)


def _redone(paid: Moving, crossing: Crossing, taker: Taker) -> Moving:
    """With a value computed again by one that takes it."""
    row = paid[taker.stage]
    workspace = max(row.workspace_bytes, crossing.workspace_bytes)
    again_ns = row.again_ns + taker.again_ns
    return _with(paid, taker.stage, row._replace(again_ns=again_ns, workspace_bytes=workspace))


def _received(paid: Moving, crossing: Crossing, taker: Taker, send_ns: int, is_first: bool) -> Moving:
    """With a value received by one that takes it, which its sender pays so much more for."""
    there, here = paid[taker.stage], paid[crossing.source]
    there = there._replace(
        receive_ns=there.receive_ns + taker.receive_ns,
        wire_ns=there.wire_ns + taker.receive_ns * taker.is_far,
        received_bytes=there.received_bytes + crossing.n_bytes,
    )
    here = here._replace(
        send_ns=here.send_ns + send_ns,
        wire_ns=here.wire_ns + taker.send_ns * taker.is_far,
        sent_bytes=here.sent_bytes + crossing.sent_bytes * is_first,
    )
    return _with(_with(paid, taker.stage, there), crossing.source, here)


def _with(paid: Moving, s: int, row: Moved) -> Moving:
    return (*paid[:s], row, *paid[s + 1 :])


def settle(
    crossings: Sequence[Crossing], priced: Callable[[Moving], Priced], n_stages: int, once: bool
) -> tuple[Choice, Moving, int]:
    """The choice that is priced least; what stages have of it; the least that any choice may come to.

    Neither price may fall as more is moved; from :data:`HUGE` on memory is short. What costs least in all is
    tried first, and kept where nothing is better; where it does not fit, then that no one receives. ``once``:
    a sender pays once for all who receive. Branch and bound, a taker at a time.
    """
    turns = [(c, taker, x == 0) for c in crossings for x, taker in enumerate(c.takers)]
    nothing = _State((Moved(),) * n_stages)

    def taken(way: Sequence[bool]) -> _State:
        out = nothing
        for (crossing, taker, is_first), again in zip(turns, way, strict=True):
            out = out.then(crossing, taker, is_first, again, once)
        return out

    best = taken([again for c in crossings for again in _cheapest(c, once)])
    value, floor = priced(best.paid)
    if value >= HUGE:
        now = taken([True] * len(turns))
        total, least = priced(now.paid)
        floor = min(floor, least)
        best, value = (now, total) if total < value else (best, value)
    stack = [nothing]
    for _ in range(_STEPS):
        if not stack:
            break
        now = stack.pop()
        total, least = priced(now.paid)
        if least >= min(value, HUGE):  # nothing that follows is better, or fits
            continue
        if len(now.chosen) == len(turns):
            floor = min(floor, least)
            best, value = (now, total) if total < value else (best, value)
            continue
        turn = turns[len(now.chosen)]
        stack += [now.then(*turn, again, once) for again in (True, False)]
    return best.chosen, best.paid, min([value, floor, *(priced(now.paid)[1] for now in stack)])


def _cheapest(crossing: Crossing, once: bool) -> tuple[bool, ...]:
    """What costs least in all: no one receives, or each does what is cheaper there."""
    each = tuple(t.again_ns < t.receive_ns for t in crossing.takers)
    sends = [0, *(t.send_ns for t, redo in zip(crossing.takers, each, strict=True) if not redo)]
    shipped = sum(min(t.again_ns, t.receive_ns) for t in crossing.takers) + (
        max(sends) if once else sum(sends)
    )
    nobody = (True,) * len(crossing.takers)
    return nobody if sum(t.again_ns for t in crossing.takers) <= shipped else each
