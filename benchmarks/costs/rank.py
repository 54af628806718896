"""One rank of a two-process pipeline whose plan's predictions are held against what it does.

Starting the ranks and summing up is left to ``pipelines``.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import pathlib
import statistics
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist

import autopipe
from autopipe.measure import probe, profile
from autopipe.measure.account import Counter
from autopipe.memory import plan_memory

from .models import build


def main(name: str, out: str, n_microbatches: int, n_rounds: int, n_steps: int) -> None:
    """Plans, trains and reports one model; rank 0 writes the figures."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    model, args, kwargs = build(name)
    cluster = probe()
    n_ranks = dist.get_world_size()
    twin = copy.deepcopy(model)  # to profile again while other ranks train parts of the model
    table = _table(twin, args, kwargs, n_microbatches)
    pipe = autopipe.split(
        model, n_ranks, args, kwargs, n_microbatches=n_microbatches, costs=table, cluster=cluster
    )
    runtime = pipe.runtime()
    optimizer = torch.optim.AdamW(runtime.parameters())
    for _ in range(2):
        _step(runtime, optimizer, args, kwargs)
    runtime.report()
    steps, rounds = [], []
    for _ in range(n_rounds):
        mine = [_step(runtime, optimizer, args, kwargs) for _ in range(n_steps)]
        report = runtime.report()
        steps.append(_of_slowest(mine))
        again = _table(twin, args, kwargs, n_microbatches)
        rounds.append({"report": report.to_dict(), "again": again.to_dict()})
    peak = _peak(runtime, optimizer, args, kwargs)
    peaks: list[Any] = [None] * n_ranks
    dist.all_gather_object(peaks, peak)
    if dist.get_rank() == 0:
        result = {
            "model": name,
            "stages": _stages(pipe.plan, table, rounds),
            "step": {
                "predicted_s": pipe.plan.step_s,
                "interleaved_s": statistics.median(_step_s(pipe.plan, t) for t in _tables(table, rounds)),
                "measured_s": statistics.median(s for row in steps for s in row),
                "measured_rounds_s": [statistics.median(row) for row in steps],
            },
            "memory": [
                {"predicted_bytes": m.total_bytes, "solver_bytes": s.memory_bytes, "measured_bytes": p}
                for s, m, p in zip(pipe.plan.stages, plan_memory(pipe.plan, table), peaks, strict=True)
            ],
            "cut": [len(s.ops) for s in pipe.plan.stages],
            "link": dataclasses.asdict(cluster.link(0, n_ranks - 1)),
        }
        pathlib.Path(out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _table(model: torch.nn.Module, args: Any, kwargs: Any, n_microbatches: int) -> Any:
    """Costs as rank 0 measured them, with its peers' cores as busy as in the pipeline."""
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        captured = autopipe.capture(model, args, kwargs)
        batch = captured.ops.example_dims["batch"] // n_microbatches
        table = profile(captured, dims={"batch": batch}, n_peers=dist.get_world_size() - 1, progress=False)
        shared = [table.to_dict()]
    dist.broadcast_object_list(shared)
    return autopipe.CostTable.from_dict(shared[0])


def _step(runtime: Any, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> float:
    """Seconds of a training step on this rank, from a start that all ranks share."""
    optimizer.zero_grad()
    dist.barrier()
    start = time.perf_counter()
    runtime.step(*args, **kwargs)
    optimizer.step()
    return time.perf_counter() - start


def _of_slowest(seconds: list[float]) -> list[float]:
    """Of each step, the seconds of the rank that took longest."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, seconds)
    return [max(row) for row in zip(*every, strict=True)]


def _peak(runtime: Any, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> int:
    """The peak of live tensor bytes of one step, as a dispatch mode sees them."""
    optimizer.zero_grad()
    with Counter() as counter:
        counter.track(runtime.parameters())
        counter.track(t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t))
        _step(runtime, optimizer, args, kwargs)
    return counter.peak_bytes


def _tables(table: autopipe.CostTable, rounds: list[Any]) -> list[autopipe.CostTable]:
    return [table, *(autopipe.CostTable.from_dict(r["again"]) for r in rounds)]


def _step_s(plan: autopipe.Plan, table: autopipe.CostTable) -> float:
    """Seconds of a step of the plan's stages by another profile."""
    stages = []
    for stage in plan.stages:
        total = table.total(stage.ops)
        stages.append(dataclasses.replace(stage, forward_s=total.forward_s, backward_s=total.backward_s))
    settings = {**plan.settings, "optimizer_s_per_byte": table.optimizer_s_per_byte}
    return autopipe.simulate(dataclasses.replace(plan, stages=tuple(stages), settings=settings)).step_s


def _stages(plan: autopipe.Plan, table: autopipe.CostTable, rounds: list[Any]) -> list[dict[str, Any]]:
    """Per stage, seconds of F and B: by the first profile, the median of all, and as measured."""
    out = []
    for stage in plan.stages:
        totals = [t.total(stage.ops) for t in _tables(table, rounds)]
        measured = [r["report"]["stages"][stage.index]["measured"] for r in rounds]
        row: dict[str, Any] = {"index": stage.index}
        for kind, field in (("F", "forward_s"), ("B", "backward_s")):
            row[kind] = {
                "predicted_s": getattr(totals[0], field),
                "interleaved_s": statistics.median(getattr(t, field) for t in totals),
                "measured_s": statistics.median(m[kind] for m in measured),
            }
        out.append(row)
    return out


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
