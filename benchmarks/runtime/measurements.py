"""What the ranks measure together: contenders taking turns, and the cut that measured costs give.

Starting the ranks is left to ``ranks``, summarising to ``__main__``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

import autopipe

from . import models
from .contenders import CONTENDERS, Contender
from .endurance import endurance  # noqa: F401 - found by its name, as those below
from .exactness import exactness  # noqa: F401

Times = dict[str, dict[str, list[float]]]


def compare(
    *,
    model: str,
    options: dict[str, Any],
    row: list[int],
    rows: int,
    runners: dict[str, list[int]],
    schedule: str,
    n_microbatches: int,
    rounds: int,
    steps: int,
) -> Times:
    """Seconds and CPU seconds per step of each runner.

    ``runners``: contender → its cuts; ``contender@name`` is another of the same kind. ``row`` is the shape
    of one row of the batch.
    """
    torch.manual_seed(1)
    plain = getattr(models, model)(**options)
    x, target = models.batch(plain, row, rows)
    made = {
        name: CONTENDERS[name.split("@")[0]](plain, x, target, cuts, schedule, n_microbatches)
        for name, cuts in runners.items()
    }
    return take_turns(made, rounds, steps)


def take_turns(made: Mapping[str, Contender], rounds: int, steps: int) -> Times:
    """Rounds in which each contender makes some steps; every other round in reverse order."""
    names = list(made)
    times: Times = {key: {name: [] for name in names} for key in ("wall_s", "cpu_s")}
    for step, _ in made.values():
        for _ in range(2):  # warms up
            step()
    for turn in range(rounds):
        for name in names if turn % 2 else reversed(names):
            wall_s, cpu_s = _measure(made[name], steps)
            times["wall_s"][name].append(wall_s)
            times["cpu_s"][name].append(cpu_s)
    return times


def _measure(contender: Contender, steps: int) -> tuple[float, float]:
    """(seconds, CPU seconds of all ranks) per step."""
    step, parameters = contender
    dist.barrier()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(steps):
        for p in parameters:
            p.grad = None
        step()
    spent_cpu_s = time.process_time() - start_cpu_s
    dist.barrier()
    spent_s = time.perf_counter() - start_s
    everyone = torch.tensor([spent_cpu_s], dtype=torch.float64)
    dist.all_reduce(everyone)
    return spent_s / steps, everyone.item() / steps


def measured_cut(
    *, model: str, options: dict[str, Any], row: list[int], rows: int, n_microbatches: int
) -> dict[str, Any]:
    """Where our planner cuts between layers for two ranks, by times it measures with both at work."""
    plain = getattr(models, model)(**options)
    captured = models.take(plain, models.batch(plain, row, rows)[0])
    plan = autopipe.plan(captured, 2, n_microbatches=n_microbatches)
    stage_ms = [1e3 * (s.forward_s + s.backward_s) for s in plan.stages]
    return {"cut": len(plan.stages[0].ops), "stage_ms": stage_ms}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    name, options, out = sys.argv[1:]
    module, _, function = name.partition(":")
    found = getattr(importlib.import_module(module), function)(**json.loads(options))
    if dist.get_rank() == 0:
        with open(out, "w") as file:  # noqa: PTH123 - a temporary file that the launcher opened
            json.dump(found, file)
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
