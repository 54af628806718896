"""The critical path of a timeline: the chain of actions and messages that makes the step as long as it is.

Shortening anything else shortens nothing. Idle time by cause is left to ``bubbles``.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from ..schedule import Action
from .messages import Key, key_of, last_arrivals
from .timeline_data import Event, Sent, TimelineData

__all__ = ["critical_path", "critical_seconds"]


def critical_path(timeline: TimelineData) -> tuple[Event | Sent, ...]:
    """From the step's start to its end, each thing the last that the next waited for.

    In a simulated step they join without gaps, but that a message may wait for its link first. In a measured
    one what remains between them is overhead. Linear in the actions.
    """
    walk = _Walk(timeline)
    last = max(timeline.events, key=lambda e: e.end_s, default=None)
    path: list[Event | Sent] = []
    while last is not None:
        path.append(last)
        sent = walk.message(last)
        before = walk.before(last)
        if sent is not None and (before is None or sent.end_s >= before.end_s):
            path.append(sent)
            before = walk.sender(sent)
        last = before
    return tuple(reversed(path))


def critical_seconds(timeline: TimelineData, path: Sequence[Event | Sent]) -> dict[str, float]:
    """The step's length by what the critical path spends it on, most first; sums to ``step_s``.

    Keys are ``"stage 2"`` and such, ``"communication"`` (waiting for a link included), ``"uneven"``,
    ``"ties"``, ``"loss"``, ``"optimizer"``, and in a measured step ``"overhead"`` for what lies between.
    """
    spent: dict[str, float] = collections.defaultdict(float)
    now = 0.0
    for part in path:
        action = getattr(part, "action", None)
        label = "communication" if action is None else _label(action)
        spent["overhead" if action is not None else label] += max(0.0, part.start_s - now)
        spent[label] += max(0.0, part.end_s - max(part.start_s, now))
        now = max(now, part.end_s)
    spent["overhead"] += timeline.step_s - now
    ordered = sorted(spent.items(), key=lambda kv: -kv[1])
    return {label: seconds for label, seconds in ordered if seconds > 0}


def _label(action: Action | str) -> str:
    return action if isinstance(action, str) else f"stage {action.stage}"


class _Walk:
    """Finds what an event waited for."""

    def __init__(self, timeline: TimelineData) -> None:
        self._previous: dict[tuple[int, Action | str], Event] = {}
        self._made: dict[Key, Event] = {}
        self._latest: dict[int, Event] = {}
        for event in timeline.events:
            if event.rank in self._latest:
                self._previous[event.rank, event.action] = self._latest[event.rank]
            self._latest[event.rank] = event
            if key := key_of(event.action):
                self._made[key] = event
        self._messages = last_arrivals(timeline)
        tied = {e.rank for e in timeline.tail if e.action == "ties"}
        own = (self._previous.get((rank, "ties")) for rank in tied)
        self._slowest_tied = max((e for e in own if e is not None), key=lambda e: e.end_s, default=None)
        made = (e for e in timeline.events_of(timeline.schedule.placement[-1]) if e.action != "optimizer")
        self._loss_made = max(made, key=lambda e: e.end_s, default=None)

    def before(self, event: Event) -> Event | None:
        """What its rank did before it, the last rank to sum tied gradients, or who makes the loss."""
        if event.action == "ties":
            return self._slowest_tied
        if event.action == "loss":
            return self._loss_made
        return self._previous.get((event.rank, event.action))

    def message(self, event: Event) -> Sent | None:
        """Of the messages the event needed, the last to arrive."""
        key = key_of(event.action)
        return None if key is None else self._messages.get(key)

    def sender(self, sent: Sent) -> Event | None:
        """The action that made the message."""
        return self._made.get((sent.source, sent.is_gradient, sent.microbatch))
