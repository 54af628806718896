"""Timelines read from their files: every value is checked against what a timeline can be.

Writing them is left to ``timeline``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from ..memory import StageMemory
from ..schedule import Action, Schedule, check, parse_action
from ..schema import Bytes, Index, Line, Name, Real, Seconds, build, refuse, versioned
from .timeline_data import TimelineData

__all__ = ["VERSION", "read_timeline"]

VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True)
class _TimelineFile:
    """What a timeline's file must have; figures that follow from these are only held against them."""

    source: Literal["simulated", "measured"]
    schedule: Name
    placement: tuple[Index, ...]
    n_microbatches: Index
    n_ranks: Index
    overlapped: tuple[Line, ...]
    step_s: Seconds
    memory: tuple[StageMemory, ...] | None
    shared_bytes: tuple[Bytes, ...]
    events: tuple[tuple[Index, Line, Real, Real], ...]
    transfers: tuple[tuple[Index, Index, bool, Index, Real, Real, Bytes], ...]


T = TypeVar("T", bound=TimelineData)


def read_timeline(cls: type[T], data: Mapping[str, Any], what: str) -> T:
    """The timeline that a file's values say.

    Raises :class:`StoreError` with the path to what does not fit, :class:`ScheduleError` where the actions
    are no sound schedule.
    """
    read = build(_TimelineFile, versioned(data, VERSION, what), what)
    schedule, events = _rows(read, what)
    check(schedule)
    timeline = cls.from_events(
        schedule, events, read.transfers, step_s=read.step_s, memory=read.memory, source=read.source
    )
    return dataclasses.replace(timeline, shared_bytes=read.shared_bytes)


def _rows(read: _TimelineFile, what: str) -> tuple[Schedule, list[tuple[int, Action | str, float, float]]]:
    n_stages, n_ranks, n_microbatches = len(read.placement), len(set(read.placement)), read.n_microbatches
    if read.n_ranks != n_ranks or max(read.placement, default=-1) >= n_ranks:
        raise refuse(what, "n_ranks", f"is {read.n_ranks}, for stages placed on {read.placement}")
    if n_stages * n_microbatches > len(read.events):
        raise refuse(what, "n_microbatches", f"is {n_microbatches}, more than there are events for")
    rows: list[list[Action]] = [[] for _ in range(n_ranks)]
    events: list[tuple[int, Action | str, float, float]] = []
    ended: dict[int, int] = {}
    for x, (rank, label, start, end) in enumerate(read.events):
        action = parse_action(label)
        if rank >= n_ranks or end < start or (action is None and label not in _TAIL):
            raise refuse(what, f"events[{x}]", f"is {label!r} on rank {rank} from {start} to {end}")
        reached = -1 if action is not None else _TAIL.index(label)
        if ended.get(rank, -1) >= max(0, reached):
            raise refuse(what, f"events[{x}]", f"is {label!r} on rank {rank}, which had ended its step")
        ended |= {rank: reached} if action is None else {}
        if action is not None:
            rows[rank].append(action)
        events.append((rank, action or label, start, end))
    for x, sent in enumerate(read.transfers):
        source, destination, is_gradient, microbatch, start, end, _ = sent
        goes = source < n_stages and destination < n_stages and source != destination
        if not goes or is_gradient is (source < destination) or end < start or microbatch >= n_microbatches:
            raise refuse(what, f"transfers[{x}]", f"is {list(sent)}, of {n_stages} stages")
    for name, entries, n in (("memory", read.memory, n_stages), ("shared_bytes", read.shared_bytes, n_ranks)):
        if entries and len(entries) != n:
            raise refuse(what, name, f"has {len(entries)} entries for {n}")
    overlapped = frozenset(filter(None, map(parse_action, read.overlapped)))
    actions = tuple(map(tuple, rows))
    return Schedule(read.schedule, read.placement, n_microbatches, actions, overlapped), events


_TAIL = ("uneven", "ties", "loss", "optimizer")
"""What may follow a rank's last action, in the order in which it does."""
