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
from autopipe.measure.busy_cores import pace
from autopipe.measure.kernel_counts import Counter
from autopipe.memory import plan_memory

from .causes import Ran, causes
from .load import UNSTEADY
from .models import build

_PROFILE_S, _AGAIN_S = 8.0, 3.0
"""Longer than by default: the cores of a virtual machine change their pace from second to second."""
_TRIES = 2
"""How many times as much is measured, at most, for the machine to hold its pace."""
_LOOKS, _APART_S = 5, 0.3
"""How often the pace is looked at, and how far apart: readings next to one another tell the same."""


def main(name: str, out: str, n_microbatches: int, n_rounds: int, n_steps: int, profiles: int) -> None:
    """Plans, trains and reports one model; rank 0 writes the figures.

    ``profiles`` says whether one is taken after each round beside the one taken before anything ran.
    """
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    model, args, kwargs = build(name)
    n_ranks = dist.get_world_size()
    twins = copy.deepcopy(model), copy.deepcopy(model)  # a model's weights are one pipeline's only
    given = twins[0], args, kwargs, n_microbatches
    cluster, table, at_first = _predictors(*given)
    how: dict[str, Any] = {"n_microbatches": n_microbatches, "costs": table, "cluster": cluster}
    pipe = autopipe.split(model, n_ranks, args, kwargs, **how)
    uniform = autopipe.split(twins[1], n_ranks, args, kwargs, balance="uniform", **how)
    ours, theirs = _Trained(pipe, args, kwargs), _Trained(uniform, args, kwargs)
    ours.runtime.report()
    rounds: list[_Round] = []
    while sum(r.is_steady for r in rounds) < n_rounds and len(rounds) < _TRIES * n_rounds:
        paces: list[float] = []
        ran = ours.train(n_steps, paces), theirs.train(n_steps if n_ranks > 1 else 0, paces)
        report = ours.runtime.report().to_dict()
        again = _table(*given, min_s=_AGAIN_S) if profiles else table
        rounds.append(_Round(*ran, report, again, abs(statistics.median(paces) / at_first - 1) < UNSTEADY))
    n_steady = sum(r.is_steady for r in rounds)
    rounds = [r for r in rounds if r.is_steady or not n_steady]
    peaks: list[Any] = [None] * n_ranks
    dist.all_gather_object(peaks, _peak(ours, args, kwargs))
    steps, other = _gathered([r.ours for r in rounds]), _gathered([r.theirs for r in rounds])
    if dist.get_rank() == 0:
        measured_s = statistics.median(_lengths(steps))
        tables = [table, *(r.again for r in rounds)]
        result = {
            "model": name,
            "steady_rounds": n_steady,
            "stages": _stages(pipe.plan, tables, [r.report for r in rounds]),
            "step": {
                "predicted_s": pipe.plan.step_s,
                "interleaved_s": statistics.median(_step_s(pipe.plan, t) for t in tables),
                "measured_s": measured_s,
                "measured_rounds_s": [
                    statistics.median(_lengths([rank[i : i + n_steps] for rank in steps]))
                    for i in range(0, len(steps[0]), n_steps)
                ],
            },
            "causes": causes(pipe.plan, steps, measured_s),
            "uniform": {
                "predicted_s": uniform.plan.step_s,
                "measured_s": statistics.median(_lengths(other) or [uniform.plan.step_s]),
            },
            "memory": [
                {"predicted_bytes": m.total_bytes, "solver_bytes": s.memory_bytes, "measured_bytes": p}
                for s, m, p in zip(pipe.plan.stages, plan_memory(pipe.plan, table), peaks, strict=True)
            ],
            "cut": [len(s.ops) for s in pipe.plan.stages],
            "link": dataclasses.asdict(cluster.link(0, n_ranks - 1)),
            "speed": cluster.devices[0].speed,
        }
        pathlib.Path(out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


@dataclasses.dataclass(frozen=True, slots=True)
class _Round:
    """This rank's steps of the plan and of the uniform split, and whether the machine held its pace."""

    ours: list[Ran]
    theirs: list[Ran]
    report: dict[str, Any]
    again: autopipe.CostTable
    is_steady: bool


def _predictors(*given: Any) -> tuple[autopipe.Cluster, autopipe.CostTable, float]:
    """Links and costs, taken again where the machine's pace changed meanwhile, and its pace."""
    before = _pace()
    for _ in range(_TRIES):
        cluster, table = autopipe.probe(), _table(*given, min_s=_PROFILE_S)
        after = _pace()
        is_steady, at_first = abs(after / before - 1) < UNSTEADY, (before + after) / 2
        if is_steady:
            break
        before = after
    return cluster, table, at_first


def _pace() -> float:
    """The pace over a second or two; every rank calls it."""
    found = []
    for _ in range(_LOOKS):
        time.sleep(_APART_S)
        found.append(pace())
    return statistics.median(found)


class _Trained:
    """A pipeline with its optimizer, warm."""

    def __init__(self, pipe: autopipe.Pipe, args: Any, kwargs: Any):
        self.runtime = pipe.runtime()
        self.optimizer = torch.optim.AdamW(self.runtime.parameters())
        self._given = args, kwargs
        self.train(2, [])

    def train(self, n_steps: int, paces: list[float]) -> list[Ran]:
        """Steps from starts that all ranks share, and the machine's pace before each."""
        ran = []
        for _ in range(n_steps):
            paces.append(pace())
            self.optimizer.zero_grad()
            dist.barrier()
            ran.append(Ran.of(self.runtime, self.optimizer, *self._given))
        return ran


def _gathered(rounds: list[list[Ran]]) -> list[list[Ran]]:
    """Every rank's steps, on every rank."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [ran for steps in rounds for ran in steps])
    return every


def _lengths(ranks: list[list[Ran]]) -> list[float]:
    """Of each step, the seconds of the rank that took longest."""
    return [max(ran.stepped_s - ran.start_s for ran in step) for step in zip(*ranks, strict=True)]


def _table(
    model: torch.nn.Module, args: Any, kwargs: Any, n_microbatches: int, *, min_s: float
) -> autopipe.CostTable:
    """Costs as rank 0 measured them, with its peers' cores as busy as in the pipeline."""
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        captured = autopipe.capture(model, args, kwargs)
        table = autopipe.profile(
            captured,
            n_microbatches=n_microbatches,
            n_peers=dist.get_world_size() - 1,
            min_s=min_s,
            max_passes=100,
            progress=False,
        )
        shared = [table.to_dict()]
    dist.broadcast_object_list(shared)
    return autopipe.CostTable.from_dict(shared[0])


def _peak(ran: _Trained, args: Any, kwargs: Any) -> int:
    """The peak of live tensor bytes of one step, as a dispatch mode sees them."""
    ran.optimizer.zero_grad()
    with Counter() as counter:
        counter.track(ran.runtime.parameters())
        counter.track(t for s in ran.optimizer.state.values() for t in s.values() if torch.is_tensor(t))
        ran.runtime.step(*args, **kwargs)
        ran.optimizer.step()
    return counter.peak_bytes


def _step_s(plan: autopipe.Plan, table: autopipe.CostTable) -> float:
    """Seconds of a step of the plan's stages by another profile."""
    stages = []
    for stage in plan.stages:
        total, speed = table.total(stage.ops), plan.cluster.devices[stage.rank].speed
        stages.append(
            dataclasses.replace(stage, forward_s=total.forward_s / speed, backward_s=total.backward_s / speed)
        )
    settings = {**plan.settings, "optimizer_s_per_byte": table.optimizer_s_per_byte}
    return autopipe.simulate(dataclasses.replace(plan, stages=tuple(stages), settings=settings)).step_s


def _stages(
    plan: autopipe.Plan, tables: list[autopipe.CostTable], reports: list[Any]
) -> list[dict[str, Any]]:
    """Per stage, seconds of F and B: by the first profile, the median of all, and as measured."""
    out = []
    for stage in plan.stages:
        totals = [t.total(stage.ops) for t in tables]
        speed = plan.cluster.devices[stage.rank].speed
        measured = [r["stages"][stage.index]["measured"] for r in reports]
        row: dict[str, Any] = {"index": stage.index}
        for kind, field in (("F", "forward_s"), ("B", "backward_s")):
            row[kind] = {
                "predicted_s": getattr(totals[0], field) / speed,
                "interleaved_s": statistics.median(getattr(t, field) for t in totals) / speed,
                "measured_s": statistics.median(m[kind] for m in measured),
            }
        out.append(row)
    return out


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
