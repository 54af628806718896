"""Plans held against each other under several schedules.

Simulating is left to ``simulator``, printing to the verbs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arguments import one_of
from ..costs import CostTable
from ..errors import AutopipeError, PlanError
from ..look import Column, Table
from ..look.table import count, nbytes, percent, seconds
from ..memory import memory_limits
from ..plans import Plan
from ..schedule import NAMES
from ..simulator import Timeline, simulate
from ..units import format_bytes
from .planning import Request

__all__ = ["Compared", "comparison", "over_memory", "plans_of"]

Compared = tuple[Plan | tuple[int, PlanError], int, CostTable | None]
"""A plan, or for how many stages there is none and why; how many microbatches; and its costs, if known."""


def plans_of(
    request: Request, stages: Sequence[int], counts: Sequence[int], memory: str | None
) -> list[Compared]:
    """A plan of the model per stage count and microbatch count; it is loaded and costed once per latter.

    Raises :class:`PlanError` where there is none at all.
    """
    import autopipe

    out: list[Compared] = []
    for n in counts:
        captured, costs = request.profile(n)
        for n_stages in stages:
            options = {"device": request.hardware or request.making.device, "cluster": request.making.cluster}
            known: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
            try:
                plan = autopipe.plan(
                    captured, n_stages, costs=costs, n_microbatches=n, memory_limit=memory, **known
                )
                out.append((plan, n, costs))
            except PlanError as error:
                out.append(((n_stages, error), n, costs))
    if all(isinstance(found, tuple) for found, *_ in out):
        raise next(found[1] for found, *_ in out if isinstance(found, tuple))
    return out


def comparison(plans: Sequence[Compared], schedules: Sequence[str]) -> Table:
    """A row per plan with its microbatch count and schedule, the least time per microbatch first.

    A schedule that does not fit a plan's placement has a row that says so, as has a count of stages without
    a plan; what is over a rank's memory limit comes after all that is not. A plan's microbatch stays what it
    was, so more of them are a larger batch. Raises :class:`InputError` for schedules that do not exist.
    """
    known = [one_of("--schedules", schedule, NAMES) for schedule in schedules]
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
    rows = [_row(*compared, schedule) for compared in plans for schedule in known]
    rows.sort(key=lambda row: (row[4] is None, row[8] != "", row[5]))
    return Table("Schedules", columns, tuple(rows), "Cuts are those of the plan.")


def over_memory(plan: Plan, timeline: Timeline) -> list[str]:
    """The ranks that a step of the plan needs more bytes on than they may use, in words."""
    pairs = zip(timeline.peak_bytes, memory_limits(plan), strict=False)
    return [
        f"rank {r} needs {format_bytes(peak)}, limit {format_bytes(limit)}"
        for r, (peak, limit) in enumerate(pairs)
        if limit is not None and peak > limit
    ]


def _row(
    plan: Plan | tuple[int, PlanError], n: int, costs: CostTable | None, schedule: str
) -> tuple[Any, ...]:
    if isinstance(plan, tuple):
        return (plan[0], None, schedule, n, None, None, None, None, str(plan[1]).splitlines()[0])
    head = (plan.n_stages, plan.n_ranks, schedule, n)
    try:
        t = simulate(plan, schedule=schedule, n_microbatches=n, costs=costs)
    except AutopipeError as error:
        return (*head, None, None, None, None, str(error).splitlines()[0])
    peak = max(t.peak_bytes) if t.peak_bytes else None
    return (*head, t.step_s, t.step_s / n, t.bubble_fraction, peak, "; ".join(over_memory(plan, t)))
