"""Tables of a plan: its stages, what crosses between them, ties, and what else was simulated.

How a table prints is left to ``table``.
"""

from __future__ import annotations

import math
from typing import Any

from ..plans import Plan, StagePlan
from ..units import n_of
from .colours import bar, swatch
from .generic import headline, tables
from .table import Column, Table, count, nbytes, percent, runs, seconds

__all__ = ["boundary_table", "candidate_table", "certificate", "stage_table", "tie_table"]


@headline.register
def _(plan: Plan) -> str:
    ranks = f"{n_of(plan.n_stages, 'stage')} on {n_of(plan.n_ranks, 'rank')}"
    if crowd := plan.cluster.crowd:
        ranks += f" ({crowd[0]} of which share {n_of(crowd[1], 'core', 'cores')})"
    run = f"{plan.schedule}, {n_of(plan.n_microbatches, 'microbatch', 'microbatches')}"
    return f"{plan.model}: {ranks}, {run}, step {seconds(plan.step_s)} predicted, {certificate(plan)}"


def certificate(plan: Plan) -> str:
    """How good a plan is known to be: of its step, which is minimised, and of its bottleneck."""
    bottleneck = "proved least" if plan.bounds.proved else _within(plan.bounds.gap)
    return f"step {_within(plan.step_gap)}, bottleneck {bottleneck}"


def _within(gap: float) -> str:
    return "without a bound" if math.isinf(gap) else f"within {percent(gap)} of the least"


@tables.register
def _(plan: Plan) -> tuple[Table, ...]:
    every = (stage_table(plan), boundary_table(plan), tie_table(plan), candidate_table(plan))
    return (every[0], *(t for t in every[1:] if t.rows))


def stage_table(plan: Plan) -> Table:
    """One row per stage."""
    again = any(s.recompute or s.recomputed for s in plan.stages)
    columns = (
        Column("stage", "stage", count, swatch),
        Column("rank", "rank", count),
        Column("first", "first op", extra=True),
        Column("last", "last op", extra=True),
        Column("n_ops", "ops", count, extra=True),
        Column("forward_s", "forward", seconds),
        Column("backward_s", "backward", seconds),
        Column("load", "load", percent, bar),
        Column("parameter_bytes", "weights", nbytes),
        Column("saved_bytes", "saved", nbytes, extra=True),
        Column("in_flight", "in flight", count, extra=True),
        Column("memory_bytes", "memory", nbytes),
        *(Column("again", "runs again"),) * again,
    )
    longest = max((s.seconds for s in plan.stages), default=0.0) or 1.0
    rows = tuple((*_stage_row(s, longest), *(_again(s),) * again) for s in plan.stages)
    note = "Times per microbatch; load relative to the slowest stage."
    if tail := plan.settings.get("tail"):
        note += f" {tail}."
    return Table("Stages", columns, rows, note)


def _stage_row(s: StagePlan, longest: float) -> tuple[Any, ...]:
    own = [op for op in s.ops if op not in set(s.clones)] or list(s.ops) or [""]
    times = (s.forward_s, s.backward_s, s.seconds / longest)
    memory = (s.parameter_bytes, s.saved_bytes, s.in_flight, s.memory_bytes)
    return (s.index, s.rank, own[0], own[-1], len(s.ops), *times, *memory)


def _again(s: StagePlan) -> str:
    """What a stage computes again in backward, in its ops' names."""
    blocks = [ops[0] if len(ops) == 1 else f"{ops[0]} to {ops[-1]}" for ops in s.recomputed]
    return "all of it" if s.recompute else ", ".join(blocks)


def boundary_table(plan: Plan) -> Table:
    """What crosses between stages, and what is computed again instead."""
    columns = (
        Column("value", "value"),
        Column("source", "from stage"),
        Column("destinations", "to stages", runs),
        Column("n_bytes", "size", nbytes),
        Column("way", "way"),
    )
    sent = [
        (b.value, b.source, b.destinations, b.n_bytes, "sent, gradient back" if b.differentiable else "sent")
        for b in plan.boundaries
    ]
    clones = sorted({op for s in plan.stages for op in s.clones})
    again = [(op, None, plan.stages_of[op], None, "recomputed in each") for op in clones]
    return Table("Boundaries", columns, (*sent, *again), "Sizes per microbatch and direction.")


def tie_table(plan: Plan) -> Table:
    """Parameters that several stages use."""
    columns = (
        Column("parameter", "parameter"),
        Column("names", "names"),
        Column("stages", "stages", runs),
        Column("n_bytes", "size", nbytes),
        Column("mode", "mode"),
        Column("seconds", "per step", seconds),
    )
    rows = tuple((t.parameter, t.names, t.stages, t.n_bytes, t.mode, t.seconds) for t in plan.ties)
    return Table("Tied parameters", columns, rows)


def candidate_table(plan: Plan) -> Table:
    """What else was simulated."""
    columns = (
        Column("label", "alternative"),
        Column("schedule", "schedule"),
        Column("n_stages", "stages", count),
        Column("n_microbatches", "microbatches", count),
        Column("step_s", "step", seconds),
        Column("relative", "vs plan", lambda x: "–" if x is None else f"{x:.3f}×"),
        Column("memory_bytes", "fullest rank", nbytes),
        Column("feasible", "fits", lambda ok: "yes" if ok else "no"),
    )
    rows = tuple(
        (
            c.label,
            c.schedule,
            c.n_stages,
            c.n_microbatches,
            c.step_s,
            c.step_s / plan.step_s if plan.step_s else None,
            c.memory_bytes,
            c.feasible,
        )
        for c in plan.candidates
    )
    more = plan.n_candidates - len(rows)
    notes = [
        f"The best by each rule, and of each other schedule and count of stages; {more} more were simulated."
    ] * (more > 0)
    if steps := plan.settings.get("steps_by_microbatches"):
        told = ", ".join(f"{seconds(step)} as {n}" for n, step in steps.items())
        notes.append(f"Steps of the batch cut into other counts of microbatches: {told}.")
    return Table("Alternatives", columns, rows, " ".join(notes))
