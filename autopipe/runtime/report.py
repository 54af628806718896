"""Gathers what the ranks measured into one report beside the plan's predictions.

The report itself is plain data of ``simulator``; drawing it is left to ``look``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from ..plans import Plan
from ..schedule import Action
from ..simulator import Report, StageReport, Timeline, simulate

__all__ = ["make_report", "peak_bytes", "reset_peak"]


def make_report(plan: Plan, ranks: Sequence[dict[str, Any]]) -> Report:
    """A report from what each process recorded.

    ``steps`` of (origin, duration, marks) with equal lengths, and ``peak_bytes``, None where not counted.
    """
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
    in_turn, peaks = len(ranks) < plan.n_ranks, [record["peak_bytes"] for record in ranks]
    return Report(
        stages,
        _work_s(simulate(plan)) if in_turn else simulate(plan).before_optimizer_s,
        statistics.median(lengths) if lengths else 0.0,
        n_steps,
        tuple(sorted(events, key=lambda e: (e[2], e[0]))),
        plan,
        in_turn,
        () if in_turn or None in peaks else tuple(peaks),
    )


def reset_peak(device: torch.device) -> None:
    """Count the most that is held from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """The most that CUDA's allocator held on the device since ``reset_peak``; None elsewhere."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _work_s(timeline: Timeline) -> float:
    """The actions of a step one after another."""
    return sum(e.end_s - e.start_s for e in timeline.events if isinstance(e.action, Action))
