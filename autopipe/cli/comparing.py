"""Plans held against each other: under several schedules, and before against after.

Simulating is left to ``simulator``, printing to the verbs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..errors import AutopipeError
from ..look import Column, Table
from ..look.table import count, nbytes, percent, seconds, word
from ..plans import Plan
from ..simulator import simulate
from .planning import Request

__all__ = ["Difference", "comparison", "difference", "plans_of"]


def plans_of(
    request: Request, stages: Sequence[int], counts: Sequence[int], memory: str | None
) -> list[tuple[Plan, int]]:
    """A plan of the model per stage count and microbatch count; it is loaded and costed once per latter."""
    import autopipe

    out = []
    for n in counts:
        captured, costs = request.profile(n)
        for n_stages in stages:
            options = {"device": request.hardware or request.device, "cluster": request.cluster}
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


@dataclasses.dataclass(frozen=True)
class Difference:
    """Two plans' figures side by side, and those in which the second is worse by more than a threshold."""

    rows: tuple[tuple[str, float, float, str], ...]
    moved: tuple[tuple[str, str, str], ...]
    worse: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        figures = [{"what": w, "before": a, "after": b} for w, a, b, _ in self.rows]
        moved = [{"op": op, "before": a, "after": b} for op, a, b in self.moved]
        return {"figures": figures, "moved": moved, "worse": list(self.worse)}

    def __str__(self) -> str:
        show = {"s": seconds, "bytes": nbytes, "": count, "share": percent}
        columns = (
            Column("what", ""),
            Column("before", "before"),
            Column("after", "after"),
            Column("change", "change"),
        )
        rows = tuple(
            (w, show[u](a), show[u](b), f"{b / a - 1:+.1%}" if a else "–") for w, a, b, u in self.rows
        )
        parts = [Table("", columns, rows).text()]
        if self.moved:
            ops = (Column("op", "op"), Column("before", "was in"), Column("after", "now in"))
            parts.append(Table(f"{len(self.moved)} ops moved", ops, self.moved).text(max_rows=20))
        return "\n\n".join(parts)


def difference(before: Plan, after: Plan, threshold: float) -> Difference:
    """What changed; step time and the fullest rank's memory decide whether it is worse."""
    fullest = [max(simulate(p).peak_bytes, default=0) for p in (before, after)]
    sent = [sum(b.n_bytes * len(b.destinations) for b in p.boundaries) for p in (before, after)]
    rows = (
        ("step", before.step_s, after.step_s, "s"),
        ("slowest stage", before.bounds.bottleneck_s, after.bounds.bottleneck_s, "s"),
        ("fullest rank", fullest[0], fullest[1], "bytes"),
        ("sent forward per microbatch", sent[0], sent[1], "bytes"),
        ("stages", before.n_stages, after.n_stages, ""),
        ("microbatches", before.n_microbatches, after.n_microbatches, ""),
        ("gap to optimum", before.bounds.gap, after.bounds.gap, "share"),
    )
    ops = dict.fromkeys([*before.stages_of, *after.stages_of])
    pairs = ((op, before.stages_of.get(op, ()), after.stages_of.get(op, ())) for op in ops)
    moved = tuple((op, word(a), word(b)) for op, a, b in pairs if a != b)
    judged = {"step", "fullest rank"}
    worse = tuple(w for w, a, b, _ in rows if w in judged and b > a * (1 + threshold))
    return Difference(rows, moved, worse)
