"""A timeline with all that may be asked of it: idle time by cause, critical path, text, traces, JSON.

Its data are left to ``timeline_data``, making one to ``simulate_schedule`` and to the runtime.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

from ..schema import differs
from ..shown import Shown
from .bubbles import Bubble, bubbles_of
from .chrome_trace import chrome_trace
from .critical_path import critical_path, critical_seconds
from .gantt import gantt
from .messages import messages_of
from .timeline_data import Event, Sent, TimelineData
from .timeline_file import VERSION, read_timeline

__all__ = ["Timeline"]


@dataclasses.dataclass(frozen=True)
class Timeline(TimelineData, Shown):
    """One step of a schedule in time, and what it tells; see :class:`TimelineData` for its fields."""

    @functools.cached_property
    def messages(self) -> tuple[Sent, ...]:
        """The transfers, or for a measured step without any what its waits tell of them."""
        return messages_of(self)

    @functools.cached_property
    def bubbles(self) -> tuple[Bubble, ...]:
        """Per rank, its idle time by cause; sums to ``step_s − busy_s``."""
        return bubbles_of(self)

    @property
    def bubble(self) -> Bubble:
        """All ranks' idle time by cause, in rank-seconds."""
        return sum(self.bubbles, Bubble())

    @functools.cached_property
    def critical_path(self) -> tuple[Event | Sent, ...]:
        """The chain of actions and messages that makes the step as long as it is, in time order."""
        return critical_path(self)

    @property
    def critical_s(self) -> dict[str, float]:
        """The step's length by stage, communication, ties and optimizer along the critical path."""
        return critical_seconds(self, self.critical_path)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and numbers, for JSON."""
        return {
            "version": VERSION,
            "source": self.source,
            "schedule": self.schedule.name,
            "placement": list(self.schedule.placement),
            "n_microbatches": self.schedule.n_microbatches,
            "n_ranks": self.schedule.n_ranks,
            "overlapped": sorted(map(str, self.schedule.overlapped)),
            "step_s": self.step_s,
            "bubble_fraction": self.bubble_fraction,
            "bubble": dataclasses.asdict(self.bubble),
            "critical_s": self.critical_s,
            "busy_s": list(self.busy_s),
            "peak_bytes": list(self.peak_bytes),
            "memory": [dataclasses.asdict(m) for m in self.memory] if self.memory else None,
            "shared_bytes": list(self.shared_bytes),
            "events": [[e.rank, str(e.action), e.start_s, e.end_s] for e in self.events],
            "transfers": [list(t) for t in self.sent],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Timeline:
        """The inverse of :meth:`to_dict`.

        Raises :class:`StoreError`, with the path to the fault, for anything that is not one's ``to_dict``,
        and :class:`ScheduleError` where its actions are no sound schedule.
        """
        what = "the timeline"
        timeline = read_timeline(cls, data, what)
        differs(data, json.loads(json.dumps(timeline.to_dict())), what)
        return timeline

    def to_chrome_trace(self) -> dict[str, Any]:
        """Chrome / Perfetto trace: a process per rank, flow arrows from send to receive, memory counters."""
        return chrome_trace({self.source: self})

    def gantt(self, width: int = 100) -> str:
        """The step as text: a line per rank, time to the right, microbatch numbers in their actions."""
        return gantt(self, width)

    def __str__(self) -> str:
        return self.gantt()

    def __repr__(self) -> str:
        return f"Timeline({self.summary})"
