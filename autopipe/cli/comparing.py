"""Plans held against each other under several schedules.

Simulating is left to ``simulator``, printing to the verbs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import AutopipeError
from ..look import Column, Table
from ..look.table import count, nbytes, percent, seconds
from ..plans import Plan
from ..simulator import simulate
from .planning import Request

__all__ = ["comparison", "plans_of"]


def plans_of(
    request: Request, stages: Sequence[int], counts: Sequence[int], memory: str | None
) -> list[tuple[Plan, int]]:
    """A plan of the model per stage count and microbatch count; it is loaded and costed once per latter."""
    import autopipe

    out = []
    for n in counts:
        captured, costs = request.profile(n)
        for n_stages in stages:
            options = {"device": request.hardware or request.making.device, "cluster": request.making.cluster}
            known: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
            plan = autopipe.plan(
                captured, n_stages, costs=costs, n_microbatches=n, memory_limit=memory, **known
            )
            out.append((plan, n))
    return out


def comparison(plans: Sequence[tuple[Plan, int]], schedules: Sequence[str]) -> Table:
    """A row per plan with its microbatch count and schedule, the least time per microbatch first.

    A schedule that does not fit a plan's placement has a row that says so. A plan's microbatch stays what it
    was, so more of them are a larger batch.
    """
    columns = (
        Column("n_stages", "stages", count),
        Column("n_ranks", "ranks", count),
        Column("schedule", "schedule"),
        Column("n_microbatches", "microbatches", count),
        Column("step_s", "step", seconds),
        Column("per_microbatch_s", "per microbatch", seconds),
        Column("bubble_fraction", "idle", percent),
        Column("peak_bytes", "fullest rank", nbytes),
        Column("problem", "problem"),
    )
    rows = [_row(plan, schedule, n) for plan, n in plans for schedule in schedules]
    rows.sort(key=lambda row: (row[4] is None, row[5]))
    return Table("Schedules", columns, tuple(rows), "Cuts are those of the plan.")


def _row(plan: Plan, schedule: str, n: int) -> tuple[Any, ...]:
    head = (plan.n_stages, plan.n_ranks, schedule, n)
    try:
        t = simulate(plan, schedule=schedule, n_microbatches=n)
    except AutopipeError as error:
        return (*head, None, None, None, None, str(error).splitlines()[0])
    peak = max(t.peak_bytes) if t.peak_bytes else None
    return (*head, t.step_s, t.step_s / n, t.bubble_fraction, peak, "")
