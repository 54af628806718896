"""What ranks recorded of their last steps, and the report it makes beside the plan's predictions.

Recording and bringing it together is left to ``runtime`` and ``watched``; drawing the report to ``look``.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ..plans import Plan
from ..schedule import Action, Message
from .plan_inputs import stage_times
from .report import Report, StageReport
from .simulate_plan import in_turn_s
from .timeline_data import Sent

__all__ = ["Ran", "Recorded", "make_report"]


class Ran(msgspec.Struct, frozen=True):
    """One step of one process: (what, start, end) of its actions, and of each message sent and awaited.

    ``origin_s`` is when it began, by rank 0's clock.
    """

    origin_s: float
    length_s: float
    actions: list[tuple[Action, float, float]]
    sent: list[tuple[Message, float, float]]
    awaited: list[tuple[Message, float, float]]

    @property
    def order(self) -> list[Action]:
        """What was done, one after another."""
        return [action for action, _, _ in self.actions]

    @property
    def span_s(self) -> float:
        """From the start of the first action, or wait for its message, to the end of the last or its send."""
        marks = [*self.actions, *self.sent, *self.awaited]
        return max(end for _, _, end in marks) - min(start for _, start, _ in marks) if marks else 0.0

    @property
    def between_s(self) -> float:
        """Seconds between actions that are no wait for a message, for each action."""
        taken_s = sum(end - start for _, start, end in [*self.actions, *self.awaited])
        return (self.span_s - taken_s) / max(1, len(self.actions))

    @classmethod
    def of(cls, origin_s: float, length_s: float, marks: Sequence[tuple[Any, float, float]]) -> Ran:
        """Of what a clock marked."""
        actions = [mark for mark in marks if isinstance(mark[0], Action)]
        others = [mark for mark in marks if not isinstance(mark[0], Action) and mark[0].message is not None]
        kinds = {
            kind: [(w.message, s, e) for w, s, e in others if w.kind == kind] for kind in ("send", "recv")
        }
        return cls(origin_s, length_s, actions, kinds["send"], kinds["recv"])


class Recorded(msgspec.Struct, frozen=True):
    """What one process recorded: its last steps, how large what it sent in the last was, and its peak."""

    steps: list[Ran]
    message_bytes: list[tuple[Message, int]]
    peak_bytes: int | None


def make_report(plan: Plan, ranks: Sequence[Recorded]) -> Report:
    """A report from what each process recorded, in equally many steps."""
    measured: dict[tuple[int, str], list[float]] = {}
    for record in ranks:
        for ran in record.steps:
            for action, start_s, end_s in ran.actions:
                measured.setdefault((action.stage, action.kind), []).append(end_s - start_s)
    stages = tuple(
        StageReport(
            s.index,
            s.rank,
            dict(zip("FBIW", times.by_code, strict=True)),
            {k: statistics.median(measured[s.index, k]) for k in "FBIW" if (s.index, k) in measured},
        )
        for s, times in zip(plan.stages, stage_times(plan), strict=True)
    )
    n_steps = len(ranks[0].steps)
    alike = [i for i in range(n_steps) if all(r.steps[i].order == r.steps[-1].order for r in ranks)]
    lengths = [max(record.steps[i].length_s for record in ranks) for i in alike]
    events: list[tuple[int, Action, float, float]] = []
    sent: dict[Message, tuple[float, float]] = {}
    awaited: dict[Message, tuple[float, float]] = {}
    for ran, late_s in _last_steps(ranks) if n_steps else ():
        events += [(plan.stages[a.stage].rank, a, late_s + s, late_s + e) for a, s, e in ran.actions]
        sent |= {m: (late_s + s, late_s + e) for m, s, e in ran.sent}
        awaited |= {m: (late_s + s, late_s + e) for m, s, e in ran.awaited}
    in_turn, peaks = len(ranks) < plan.n_ranks, [record.peak_bytes for record in ranks]
    report = Report(
        stages=stages,
        predicted_step_s=0.0,
        measured_step_s=statistics.median(lengths) if lengths else 0.0,
        n_steps=n_steps,
        events=tuple(sorted(events, key=lambda e: (e[2], e[0]))),
        plan=plan,
        in_turn=in_turn,
        peak_bytes=() if in_turn or None in peaks else tuple(p for p in peaks if p is not None),
        messages=_messages(plan, sent, awaited, {m: n for record in ranks for m, n in record.message_bytes}),
        between_actions_s=_medians(ranks, lambda ran: ran.between_s),
        beside_actions_s=_medians(ranks, lambda ran: ran.length_s - ran.span_s),
    )
    last = report.ran if events else None
    step_s = in_turn_s(plan, last) if in_turn else report.predicted.before_optimizer_s
    return dataclasses.replace(report, predicted_step_s=step_s)


def _medians(ranks: Sequence[Recorded], figure: Callable[[Ran], float]) -> tuple[float, ...]:
    """Of each rank's steps; none before the first."""
    return tuple(statistics.median(map(figure, record.steps)) for record in ranks if record.steps)


def _last_steps(ranks: Sequence[Recorded]) -> Iterator[tuple[Ran, float]]:
    """Every rank's last step, and how many seconds after the first rank it began it."""
    first = min(record.steps[-1].origin_s for record in ranks)
    for record in ranks:
        yield record.steps[-1], record.steps[-1].origin_s - first


def _messages(
    plan: Plan,
    sent: Mapping[Message, tuple[float, float]],
    awaited: Mapping[Message, tuple[float, float]],
    sizes: Mapping[Message, int],
) -> tuple[Sent, ...]:
    """Each message from when it was sent to when it had arrived.

    Arrivals are seen only by who waits for them. One that nobody waited for is taken to have needed as long
    as the plan's link says.
    """
    found = []
    for message, (left_s, _) in sent.items():
        began_s, got_s = awaited[message]
        link = plan.cluster.link(plan.placement[message.source], plan.placement[message.destination])
        expected_s = left_s + link.seconds(sizes[message])
        arrived_s = max(left_s, got_s) if began_s < expected_s else expected_s
        ends = message.source, message.destination
        found.append(Sent(*ends, message.kind == "B", message.microbatch, left_s, arrived_s, sizes[message]))
    return tuple(sorted(found, key=lambda sent: sent.start_s))
