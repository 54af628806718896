"""Gathers what the ranks measured into one report beside the plan's predictions.

The report itself is plain data of ``simulator``; drawing it is left to ``look``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..plans import Plan
from ..schedule import Action, Message
from ..simulator import Report, Sent, StageReport, simulate, stage_times

__all__ = ["make_report"]


def make_report(plan: Plan, ranks: Sequence[dict[str, Any]]) -> Report:
    """A report from what each process recorded.

    ``steps`` of (origin, duration, marks) with equal lengths, ``message_bytes`` of what it sent in the last,
    and ``peak_bytes``, None where not counted.
    """
    measured: dict[tuple[int, str], list[float]] = {}
    for record in ranks:
        for _, _, marks in record["steps"]:
            for timed, start_s, end_s in marks:
                if isinstance(timed, Action):
                    measured.setdefault((timed.stage, timed.kind), []).append(end_s - start_s)
    stages = tuple(
        StageReport(
            s.index,
            s.rank,
            dict(zip("FBIW", times.by_code, strict=True)),
            {k: statistics.median(measured[s.index, k]) for k in "FBIW" if (s.index, k) in measured},
        )
        for s, times in zip(plan.stages, stage_times(plan), strict=True)
    )
    n_steps = len(ranks[0]["steps"])
    lengths = [max(record["steps"][i][1] for record in ranks) for i in range(n_steps)]
    events: list[tuple[int, Action, float, float]] = []
    hops: dict[str, dict[Message, tuple[float, float]]] = {"send": {}, "recv": {}}
    for timed, start_s, end_s in _last_steps(ranks) if n_steps else ():
        if isinstance(timed, Action):
            events.append((plan.stages[timed.stage].rank, timed, start_s, end_s))
        elif timed.message is not None:
            hops[timed.kind][timed.message] = start_s, end_s
    in_turn, peaks = len(ranks) < plan.n_ranks, [record["peak_bytes"] for record in ranks]
    return Report(
        stages,
        simulate(plan).work_s if in_turn else simulate(plan).before_optimizer_s,
        statistics.median(lengths) if lengths else 0.0,
        n_steps,
        tuple(sorted(events, key=lambda e: (e[2], e[0]))),
        plan,
        in_turn,
        () if in_turn or None in peaks else tuple(peaks),
        _messages(plan, hops, {m: n for record in ranks for m, n in record["message_bytes"].items()}),
    )


def _last_steps(ranks: Sequence[dict[str, Any]]) -> Iterator[tuple[Any, float, float]]:
    """The marks of every rank's last step, in seconds since the first rank began it."""
    first = min(record["steps"][-1][0] for record in ranks)
    for record in ranks:
        origin, _, marks = record["steps"][-1]
        yield from ((what, origin - first + start, origin - first + end) for what, start, end in marks)


def _messages(
    plan: Plan, hops: Mapping[str, Mapping[Message, tuple[float, float]]], sizes: Mapping[Message, int]
) -> tuple[Sent, ...]:
    """Each message from when it was sent to when it had arrived.

    Arrivals are seen only by who waits for them. One that nobody waited for is taken to have needed as long
    as the plan's link says.
    """
    found = []
    for message, (left_s, _) in hops["send"].items():
        began_s, got_s = hops["recv"][message]
        link = plan.cluster.link(plan.placement[message.source], plan.placement[message.destination])
        expected_s = left_s + link.seconds(sizes[message])
        arrived_s = max(left_s, got_s) if began_s < expected_s else expected_s
        ends = message.source, message.destination
        found.append(Sent(*ends, message.kind == "B", message.microbatch, left_s, arrived_s, sizes[message]))
    return tuple(sorted(found, key=lambda sent: sent.start_s))
