"""The families with two or three stages on each of four ranks: how far is the proof, as a V and as a loop?

Run as ``python -m benchmarks.solver.virtual``; prints one JSON list. Solving is left to the package.
"""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

from autopipe.schedule import build
from autopipe.solve import Problem, Stage, chain

from .families import problems

LAYOUTS = (("zbv", 2), ("interleaved", 2), ("interleaved", 3))
N_RANKS, N_MICROBATCHES, TIME_LIMIT_S, MOST_OPS = 4, 16, 4.0, 2000


def rows() -> list[dict[str, Any]]:
    """A row per layout and family of at most ``MOST_OPS`` ops."""
    return [
        _row(schedule, family, problem)
        for schedule, per_rank in LAYOUTS
        for family, problem in problems(per_rank * N_RANKS)
        if len(problem.items) <= MOST_OPS
    ]


def _row(name: str, family: str, problem: Problem) -> dict[str, Any]:
    schedule = build(name, N_RANKS, problem.n_stages, N_MICROBATCHES)
    alive = zip(schedule.placement, schedule.in_flight, strict=True)
    stages = tuple(Stage(rank, in_flight=n) for rank, n in alive)
    laid = dataclasses.replace(problem, stages=stages, moments=schedule.moments)
    started = time.perf_counter()
    answer = chain(laid, time_limit_s=TIME_LIMIT_S)
    return {
        "schedule": name,
        "stages": problem.n_stages,
        "family": family,
        "ops": len(problem.items),
        "proved": answer.proved,
        "gap": answer.bottleneck_ns / max(1, answer.lower_ns) - 1,
        "seconds": time.perf_counter() - started,
    }


if __name__ == "__main__":
    print(json.dumps(rows(), indent=1))
