"""Messages of a timeline that recorded none, told from when actions ran.

Messages that are known are the timeline's own ``transfers``.
"""

from __future__ import annotations

import itertools

from ..schedule import Action
from .timeline_data import Event, Sent, TimelineData

__all__ = ["messages_of"]


def messages_of(timeline: TimelineData) -> tuple[Sent, ...]:
    """The transfers, or for a measured step without any what its waits tell of them."""
    if timeline.source == "measured" and not timeline.sent:
        return tuple(map(Sent._make, _handovers(timeline)))
    return timeline.transfers


def _handovers(timeline: TimelineData) -> list[tuple[int, int, bool, int, float, float, int]]:
    """One message of unknown size per hand-over between neighbouring stages on different ranks.

    Each leaves when the action that makes it ends. It arrives when the action that needs it starts, where
    that one's rank was free before and so waited for it; else, for all one can tell, at once.
    """
    schedule = timeline.schedule
    made = {
        (e.action.stage, e.action.kind != "F", e.action.microbatch): e.end_s
        for e in timeline.events
        if isinstance(e.action, Action) and e.action.kind != "W"
    }
    out = []
    for rank in range(schedule.n_ranks):
        first: list[Event | None] = [None]
        for before, event in itertools.pairwise((*first, *timeline.events_of(rank))):
            if event is None or isinstance(event.action, str) or event.action.kind == "W":
                continue
            back, m = event.action.kind != "F", event.action.microbatch
            source = event.action.stage + (1 if back else -1)
            if not 0 <= source < schedule.n_stages or schedule.placement[source] == rank:
                continue
            left_s = made[source, back, m]
            waited = (0.0 if before is None else before.end_s) < left_s
            arrived_s = max(left_s, event.start_s) if waited else left_s
            out.append((source, event.action.stage, back, m, left_s, arrived_s, 0))
    return out
