"""Gathers what the ranks measured into one report beside the plan's predictions.

The report itself is plain data of ``simulator``; drawing it is left to ``look``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ..plans import Plan
from ..schedule import Action
from ..simulator import Report, StageReport, simulate

__all__ = ["make_report"]


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
    events: list[tuple[int, Action, float, float]] = []
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
        simulate(plan).before_optimizer_s,
        statistics.median(lengths) if lengths else 0.0,
        n_steps,
        tuple(sorted(events, key=lambda e: (e[2], e[0]))),
        plan,
    )
