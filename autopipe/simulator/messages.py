"""A timeline's messages by the action that waits for each; where none were recorded, told from its actions.

Recording them is left to ``recorded``.
"""

from __future__ import annotations

import itertools

from ..schedule import Action
from ..schedule.clock import SentRow
from .timeline_data import Event, Sent, TimelineData

__all__ = ["Key", "key_of", "last_arrivals", "messages_of"]

Key = tuple[int, bool, int]
"""(stage, is gradient, microbatch)."""


def key_of(action: Action | str) -> Key | None:
    """What an action takes and gives messages under; None for one that does neither."""
    if isinstance(action, str) or action.kind == "W":
        return None
    return action.stage, action.kind != "F", action.microbatch


def last_arrivals(timeline: TimelineData) -> dict[Key, Sent]:
    """Of the messages that an action takes the last to arrive, by that action's key."""
    found: dict[Key, Sent] = {}
    for sent in messages_of(timeline):
        key = (sent.destination, sent.is_gradient, sent.microbatch)
        if key not in found or found[key].end_s < sent.end_s:
            found[key] = sent
    return found


def messages_of(timeline: TimelineData) -> tuple[Sent, ...]:
    """The transfers, or for a measured step without any what its waits tell of them."""
    if timeline.source == "measured" and not timeline.sent:
        return tuple(map(Sent._make, _handovers(timeline)))
    return timeline.transfers


def _handovers(timeline: TimelineData) -> list[SentRow]:
    """One message of unknown size per hand-over between neighbouring stages on different ranks.

    Each leaves when the action that makes it ends. It arrives when the action that needs it starts, where
    that one's rank was free before and so waited for it; else, for all one can tell, at once.
    """
    schedule = timeline.schedule
    made = {key: e.end_s for e in timeline.events if (key := key_of(e.action))}
    out = []
    for rank in range(schedule.n_ranks):
        first: list[Event | None] = [None]
        for before, event in itertools.pairwise((*first, *timeline.events_of(rank))):
            key = None if event is None else key_of(event.action)
            if event is None or key is None:
                continue
            stage, back, m = key
            source = stage + (1 if back else -1)
            if not 0 <= source < schedule.n_stages or schedule.placement[source] == rank:
                continue
            left_s = made[source, back, m]
            waited = (0.0 if before is None else before.end_s) < left_s
            arrived_s = max(left_s, event.start_s) if waited else left_s
            out.append((source, stage, back, m, left_s, arrived_s, 0))
    return out
