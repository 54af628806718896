"""Timelines as Chrome trace events, which Perfetto, chrome://tracing and trace analysers read.

Opening them is left to those tools.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .critical_path import critical_path
from .messages import key_of
from .timeline_data import TimelineData

__all__ = ["chrome_trace"]

NAMES = {"F": "forward", "B": "backward", "I": "backward input", "W": "backward weight"}
COLORS = {"F": "thread_state_running", "B": "rail_response", "I": "rail_response", "W": "rail_animation"}
COMPUTE = 0
"""The thread of a rank's actions; its messages to rank r are on thread 1 + r."""


def chrome_trace(timelines: Mapping[str, TimelineData], *, rank: int | None = None) -> dict[str, Any]:
    """The timelines side by side under their labels, such as predicted and measured: a process per rank.

    Messages are slices on the sender's threads, with a flow arrow to the action that needs them; memory
    is a counter. With ``rank``, that rank alone and its ``distributedInfo``, as one of a set of files.

    Times are microseconds, as the format wants.
    """
    events: list[dict[str, Any]] = []
    for i, (label, timeline) in enumerate(timelines.items()):
        n_ranks = timeline.schedule.n_ranks
        for r in range(n_ranks) if rank is None else (rank,):
            pid = r * len(timelines) + i
            name = f"rank {r}" if len(timelines) == 1 else f"rank {r} {label}"
            events += _process(timeline, r, pid, name)
        events += _messages(timeline, i, len(timelines), rank)
    out: dict[str, Any] = {"traceEvents": events, "displayTimeUnit": "ms"}
    if rank is not None:
        world = max(t.schedule.n_ranks for t in timelines.values())
        out["distributedInfo"] = {"rank": rank, "world_size": world}
    return out


def _process(timeline: TimelineData, rank: int, pid: int, name: str) -> Iterator[dict[str, Any]]:
    yield _meta("process_name", pid, COMPUTE, name=name)
    yield _meta("process_sort_index", pid, COMPUTE, sort_index=pid)
    yield _meta("thread_name", pid, COMPUTE, name="compute")
    critical = {(e.rank, e.action) for e in critical_path(timeline) if not hasattr(e, "n_bytes")}
    for event in timeline.events_of(rank):
        args: dict[str, Any] = {"stream": COMPUTE, "critical": (event.rank, event.action) in critical}
        slice_ = _slice(str(event.action), pid, COMPUTE, event.start_s, event.end_s, "kernel", args)
        if not isinstance(event.action, str):
            a = event.action
            args |= {"stage": a.stage, "kind": NAMES[a.kind], "microbatch": a.microbatch}
            slice_["cname"] = COLORS[a.kind]
        yield slice_
    for t, n_bytes in timeline.memory_over_time(rank):
        yield {
            "ph": "C",
            "name": "memory",
            "pid": pid,
            "tid": COMPUTE,
            "ts": t * 1e6,
            "args": {"bytes": n_bytes},
        }


def _messages(timeline: TimelineData, index: int, stride: int, rank: int | None) -> Iterator[dict[str, Any]]:
    placed = timeline.schedule.placement
    needed = {key: e.start_s for e in timeline.events if (key := key_of(e.action))}
    named: set[tuple[int, int]] = set()
    ends = _slice_ends(timeline)
    for i, sent in enumerate(timeline.transfers):
        here, there = placed[sent.source], placed[sent.destination]
        pid, peer = here * stride + index, there * stride + index
        flow = {"cat": "message", "name": "message", "id": i * stride + index}
        if rank in (None, here):
            if (here, there) not in named:
                named.add((here, there))
                yield _meta("thread_name", pid, 1 + there, name=f"to rank {there}")
            args = {"bytes": sent.n_bytes, "stream": 1 + there}
            yield _slice(sent.label, pid, 1 + there, sent.start_s, ends[i], "message", args)
            yield {"ph": "s", "pid": pid, "tid": 1 + there, "ts": sent.start_s * 1e6, **flow}
        at = needed.get((sent.destination, sent.is_gradient, sent.microbatch))
        if at is not None and rank in (None, there):
            yield {"ph": "f", "bp": "e", "pid": peer, "tid": COMPUTE, "ts": at * 1e6, **flow}


def _slice_ends(timeline: TimelineData) -> list[float]:
    """When each message's slice ends: as it arrives, or where the next on its link starts a latency earlier.

    Slices of one thread must not overlap.
    """
    placed, ends = timeline.schedule.placement, [sent.end_s for sent in timeline.transfers]
    latest: dict[tuple[int, int], int] = {}
    for i in sorted(range(len(ends)), key=lambda i: timeline.transfers[i].start_s):
        sent = timeline.transfers[i]
        link = placed[sent.source], placed[sent.destination]
        if link in latest:
            ends[latest[link]] = min(ends[latest[link]], sent.start_s)
        latest[link] = i
    return ends


def _slice(
    name: str, pid: int, tid: int, start_s: float, end_s: float, category: str, args: dict[str, Any]
) -> dict[str, Any]:
    ts, dur = start_s * 1e6, (end_s - start_s) * 1e6
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


def _meta(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}
