"""What the plan predicted beside what was measured: per stage, per step, and every action in time.

Drawing it is left to ``look``.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from ..plans import Plan
from ..schedule import Action
from ..units import format_seconds

__all__ = ["Report", "StageReport", "make_report"]

Event = tuple[int, Action, float, float]
"""(rank, action, start_s, end_s), seconds since the first rank began the step."""


@dataclasses.dataclass(frozen=True, slots=True)
class StageReport:
    """One stage: seconds per microbatch of each kind of action, predicted and measured (medians).

    ``measured`` has the kinds that ran: F, B, I, W.
    """

    index: int
    rank: int
    predicted: dict[str, float]
    measured: dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """Predicted beside measured.

    Attributes
    ----------
    stages: see :class:`StageReport`.
    predicted_step_s, measured_step_s: of a whole step; measured is the median of ``n_steps`` recent ones.
    events: every action of the last step, on one clock (hosts' clocks are taken as they are).
    """

    stages: tuple[StageReport, ...]
    predicted_step_s: float
    measured_step_s: float
    n_steps: int
    events: tuple[Event, ...]

    @property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time of the last step in which no action ran."""
        if not self.events:
            return 0.0
        n_ranks = 1 + max(rank for rank, *_ in self.events)
        span = max(end for *_, end in self.events) - min(start for _, _, start, _ in self.events)
        return 1 - sum(end - start for _, _, start, end in self.events) / (n_ranks * span)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers, for JSON."""
        return {**dataclasses.asdict(self), "events": [[r, str(a), s, e] for r, a, s, e in self.events]}

    def __str__(self) -> str:
        rows = [f"{'stage':>5} {'rank':>4} {'action':>6} {'predicted':>10} {'measured':>10} {'ratio':>6}"]
        for stage in self.stages:
            for kind, measured_s in stage.measured.items():
                rows.append(_row(stage.index, stage.rank, kind, stage.predicted[kind], measured_s))
        rows.append(_row("", "", "step", self.predicted_step_s, self.measured_step_s))
        return "\n".join(rows)


def _row(stage: object, rank: object, what: str, predicted_s: float, measured_s: float) -> str:
    ratio = f"{measured_s / predicted_s:.2f}" if predicted_s else "–"
    times = f"{format_seconds(predicted_s):>10} {format_seconds(measured_s):>10}"
    return f"{stage:>5} {rank:>4} {what:>6} {times} {ratio:>6}"


def make_report(plan: Plan, ranks: Sequence[dict[str, Any]]) -> Report:
    """A report from what each rank recorded: ``steps`` of (origin, duration, marks) with equal lengths."""
    measured: dict[tuple[int, str], list[float]] = {}
    for record in ranks:
        for _, _, marks in record["steps"]:
            for action, start_s, end_s in marks:
                measured.setdefault((action.stage, action.kind), []).append(end_s - start_s)
    stages = tuple(
        StageReport(
            s.index,
            s.rank,
            dict(
                zip("FBIW", (s.forward_s, s.backward_s, s.backward_input_s, s.backward_weight_s), strict=True)
            ),
            {k: statistics.median(measured[s.index, k]) for k in "FBIW" if (s.index, k) in measured},
        )
        for s in plan.stages
    )
    n_steps = len(ranks[0]["steps"])
    lengths = [max(record["steps"][i][1] for record in ranks) for i in range(n_steps)]
    events: list[Event] = []
    if n_steps:
        first = min(record["steps"][-1][0] for record in ranks)
        for record in ranks:
            origin, _, marks = record["steps"][-1]
            events += [
                (plan.stages[a.stage].rank, a, origin - first + start, origin - first + end)
                for a, start, end in marks
            ]
    return Report(
        stages,
        plan.step_s,
        statistics.median(lengths) if lengths else 0.0,
        n_steps,
        tuple(sorted(events, key=lambda e: (e[2], e[0]))),
    )
