"""A pipe on two ranks against the least its own compute allows: what each rank of the measurement does.

Starting the ranks is left to ``benchmarks.runtime.ranks``, one process to ``paired``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist

import autopipe
from autopipe.simulator import plan_schedule

from ..costs.causes import Ran, ends_s
from .models import CASES

__all__ = ["bound_s", "two_ranks"]


def bound_s(plan: autopipe.Plan, step: Sequence[Ran]) -> float:
    """The least time of a step whose actions take as long as they did, with messages for free."""
    none = [0.0] * plan.n_ranks
    actions = {action: seconds for ran in step for action, seconds in ran.actions.items()}
    return max(ends_s(plan_schedule(plan), actions, none, none))


def two_ranks(
    *, model: str, mask: str, length: int, width: int, n_microbatches: int, n_steps: int
) -> dict[str, float]:
    """Medians over steps: seconds of each, seconds that its own compute allows at least, and the ratio."""
    torch.manual_seed(0)
    case = CASES[model]
    built, given = case.make(width, 4), case.batch(2 * n_microbatches, length, mask)
    pipe = autopipe.split(built, 2, kwargs=given, n_microbatches=n_microbatches)
    runtime = pipe.runtime()
    found = []
    for _ in range(n_steps + 1):
        built.zero_grad(set_to_none=True)
        dist.barrier()
        own = Ran.of(runtime, None, (), given)
        step = [own] * dist.get_world_size()
        dist.all_gather_object(step, own)
        taken_s = max(ran.end_s for ran in step) - min(ran.start_s for ran in step)
        found.append((taken_s, bound_s(pipe.plan, step)))
    counted = found[1:]
    return {
        "step_s": statistics.median(taken_s for taken_s, _ in counted),
        "bound_s": statistics.median(least_s for _, least_s in counted),
        "over_bound": statistics.median(taken_s / least_s for taken_s, least_s in counted),
    }
