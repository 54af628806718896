"""Why ranks are idle: every gap of a timeline by its cause.

Timing the actions is left to ``simulate_schedule``.
"""

from __future__ import annotations

import dataclasses

from .messages import key_of, last_arrivals
from .timeline_data import TimelineData

__all__ = ["Bubble", "bubbles_of"]


@dataclasses.dataclass(frozen=True, slots=True)
class Bubble:
    """Idle seconds by cause.

    ``communication_s``: an input's transfer was under way, or tied gradients were. The rest is idle because
    what was needed was not computed yet: ``warmup_s`` before the first backward, ``drain_s`` after the last
    forward, ``imbalance_s`` between the two, where equal stages with equal microbatches would not wait.
    """

    warmup_s: float = 0.0
    drain_s: float = 0.0
    imbalance_s: float = 0.0
    communication_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.warmup_s + self.drain_s + self.imbalance_s + self.communication_s

    def __add__(self, other: Bubble) -> Bubble:
        names = [f.name for f in dataclasses.fields(self)]
        return Bubble(*(getattr(self, n) + getattr(other, n) for n in names))


def bubbles_of(timeline: TimelineData) -> tuple[Bubble, ...]:
    """Per rank, each gap before an action split into the part its last message travelled and the rest.

    In a measured step without messages, from the end of one action to the start of the next that waited for
    it counts as travelled, host overhead included.
    """
    made = {key: e.end_s for e in timeline.events if (key := key_of(e.action))}
    arrivals = last_arrivals(timeline)
    out = []
    for rank, row in enumerate(timeline.schedule.actions):
        first_backward = next((i for i, a in enumerate(row) if a.kind != "F"), len(row))
        last_forward = max((i for i, a in enumerate(row) if a.kind == "F"), default=-1)
        idle = {"warmup_s": 0.0, "imbalance_s": 0.0, "drain_s": 0.0, "communication_s": 0.0}
        free = 0.0
        for i, (a, start, end) in enumerate(
            zip(row, timeline.starts_s[rank], timeline.ends_s[rank], strict=True)
        ):
            if start > free:
                key = key_of(a)
                sent = None if key is None else arrivals.get(key)
                travelled = 0.0
                if sent is not None:
                    made_s = made.get((sent.source, sent.is_gradient, sent.microbatch), sent.end_s)
                    travelled = max(0.0, min(start, sent.end_s) - max(free, made_s))
                phase = (
                    "warmup_s" if i <= first_backward else "drain_s" if i > last_forward else "imbalance_s"
                )
                idle["communication_s"] += travelled
                idle[phase] += start - free - travelled
            free = max(free, end)
        for event in timeline.tail:
            if event.rank == rank:
                idle["drain_s"] += max(0.0, event.start_s - free)
                cause = _IDLE.get(str(event.action))
                if cause is not None:
                    idle[cause] += event.end_s - event.start_s
                free = event.end_s
        idle["drain_s"] += timeline.step_s - free
        out.append(Bubble(**idle))
    return tuple(out)


_IDLE = {"ties": "communication_s", "loss": "communication_s", "uneven": "imbalance_s"}
"""What of a step's tail is idle time, and its cause."""
