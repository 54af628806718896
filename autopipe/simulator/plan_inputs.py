"""What a plan says, in the simulator's terms: its schedule, times and transfers.

Running them on paper is left to ``simulate_plan``.
"""

from __future__ import annotations

import math

from ..memory import memory_limits, plan_memory, tied_bytes
from ..plans import Plan
from ..schedule import Schedule, StageTimes, Transfer, build

__all__ = ["plan_schedule", "plan_transfers", "stage_times"]


def plan_schedule(plan: Plan, name: str | None = None, n_microbatches: int | None = None) -> Schedule:
    """The schedule of a plan, or another for its stages where they are placed.

    A cost-aware one is made from the plan's times, transfers and links (from equal times where the plan has
    none), within what the memory limit of the plan's settings and of its devices leaves for activations.
    """
    return build(
        name or plan.schedule,
        plan.n_ranks,
        plan.n_stages,
        plan.n_microbatches if n_microbatches is None else n_microbatches,
        placement=plan.placement,
        times=stage_times(plan) if all(s.forward_s for s in plan.stages) else None,
        transfers=plan_transfers(plan),
        cluster=plan.cluster,
        saved_bytes=[s.saved_bytes for s in plan.stages],
        budget_bytes=_budgets(plan),
    )


def _budgets(plan: Plan) -> list[float]:
    """Per rank, what its limit leaves beside weights, gradients, optimizer state, buffers and workspace."""
    memory, budgets = plan_memory(plan), []
    shared = tied_bytes(plan)
    for rank, limit in enumerate(memory_limits(plan)):
        own = [m for m, placed in zip(memory, plan.placement, strict=True) if placed == rank]
        taken = sum(m.static_bytes + m.boundary_bytes for m in own) - shared[rank]
        taken += max(m.workspace_bytes for m in own)
        budgets.append(math.inf if limit is None else limit - taken)
    return budgets


def stage_times(plan: Plan) -> tuple[StageTimes, ...]:
    """The seconds of a plan's stages; one that owes nobody a gradient does its whole backward in W.

    One that runs again in backward, stage or blocks, does it in I, and keeps nothing of that until W.
    """
    owing = {d for b in plan.boundaries if b.differentiable for d in b.destinations}
    return tuple(
        StageTimes(s.forward_s, s.backward_s, s.backward_input_s, s.backward_weight_s)
        if s.index in owing or s.recompute or s.recomputed or not plan.boundaries
        else StageTimes(s.forward_s, s.backward_s, 0.0, s.backward_s)
        for s in plan.stages
    )


def plan_transfers(plan: Plan) -> tuple[Transfer, ...] | None:
    """What crosses between a plan's stages, one transfer per value and consumer; None where none is known."""
    if not plan.boundaries:
        return None
    return tuple(Transfer(s, d, b.n_bytes, b.differentiable, b.value) for s, d, b in plan.handed)
