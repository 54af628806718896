"""A pipe on two ranks against the least its own compute allows: what each rank of the measurement does.

Starting the ranks is left to ``benchmarks.runtime.ranks``, one process to ``paired``.
"""

from __future__ import annotations

import torch

import autopipe

from .models import CASES

__all__ = ["bound_s", "two_ranks"]


def bound_s(stages_s: list[float], n_microbatches: int) -> float:
    """The least time of a step whose stages take so long for a microbatch's forward and backward.

    The first microbatch goes through all of them, every further one through the slowest.
    """
    return sum(stages_s) + (n_microbatches - 1) * max(stages_s)


def two_ranks(
    *, model: str, mask: str, length: int, width: int, n_microbatches: int, n_steps: int
) -> dict[str, float]:
    """The median step over the bound that its own measured compute gives, both in seconds, and the ratio."""
    torch.manual_seed(0)
    case = CASES[model]
    built, given = case.make(width, 4), case.batch(2 * n_microbatches, length, mask)
    pipe = autopipe.split(built, 2, kwargs=given, n_microbatches=n_microbatches)
    runtime = pipe.runtime()
    for _ in range(n_steps + 1):
        built.zero_grad(set_to_none=True)
        runtime.step(**given)
    report = runtime.report()
    stages_s = [sum(stage.measured.get(kind, 0.0) for kind in "FBIW") for stage in report.stages]
    least_s = bound_s(stages_s, n_microbatches)
    step_s = report.measured_step_s
    return {"step_s": step_s, "bound_s": least_s, "over_bound": step_s / least_s}
