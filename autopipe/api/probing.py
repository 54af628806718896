"""Probes a job's links, and how fast its ranks are at work in a pipeline, on a model made for that.

Measuring links is left to ``measure``; what a speed does to a plan to ``solve``.

Costs are measured with nothing between a stage's passes. In a pipeline a stage's work lies between messages,
other microbatches and the threads that carry them, and ranks wait where any is late, so a step takes some
percent longer than its parts say, by how much depending on the machine; more where ranks outnumber the cores
and one takes another's place, caches and all. Ranks find out together: a small pipeline is trained in turns
with its own stages alone, as many ranks at once as there are cores for. What a rank did between actions, and
beside them all, is as long whatever the actions are; what else a step took is held against what those stages
would make of it. Model and sizes are fixed, so nothing is fitted to what is planned later.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from .. import measure
from ..arguments import whole
from ..errors import CostError
from ..hardware import Cluster, Device
from ..measure.probe import MOST_RANKS, among, job_group
from ..measure.samples import typical
from ..plans import Plan
from ..runtime import Runtime
from ..simulator import Report, simulate
from .agree import make_alike, one_call
from .verbs import split

__all__ = ["probe"]

_WIDTH, _ROWS, _TOKENS = 256, 2, 96
_BLOCKS = 3
"""Of each rank: some tens of milliseconds a microbatch, beside which what a message takes is small."""
_MICROBATCHES = 8
_ALONE_S = 0.2
"""Of the stages alone, between two steps of the pipeline."""
_TURNS, _MOST_S = 25, 13.0
"""Turns, fewer where they take long; one at least. A virtual machine's pace changes by a twentieth from one
half of a second to the next, so that a hundredth is told by tens of them."""
_WARM = 2
"""Steps before those that count."""


def probe(n_ranks: int = 2) -> Cluster:
    """The cluster of the job's ranks: links as :func:`autopipe.measure.probe` finds them, and its pace.

    Ranks that compute on the host's cores work more slowly in a pipeline than where costs are measured. The
    ``speed`` of their devices is that ratio, found by training a small pipeline for some fifteen seconds, and
    so are ``action_s`` and ``step_s``; on accelerators it is 1 and they are 0. Ranks that outnumber the cores
    take turns, which ``cores`` tells and not ``speed``; their ``action_s`` and ``step_s`` are 0 too.

    In a job started by ``torchrun`` every rank calls it and gets the same cluster; elsewhere it starts
    ``n_ranks`` processes on this machine. Raises :class:`CostError` when one of them fails.
    """
    if dist.is_initialized():
        return _of_job(n_ranks)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        with job_group("env://", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])):
            return _of_job(n_ranks)
    return among(_checked(n_ranks), __name__)


def _checked(n_ranks: int) -> int:
    return whole("n_ranks", n_ranks, most=MOST_RANKS)


def _of_job(n_ranks: int) -> Cluster:
    """The cluster of the ranks of the process group; what one alone is refused for, all raise."""
    with one_call("probe"):
        _checked(n_ranks)
        make_alike("the call of probe", lambda: "", str, None)
    try:
        return _rehearsed(measure.probe())
    except RuntimeError as error:  # torch's, where messages cannot be carried
        first_line = str(error).partition("\n")[0]
        raise CostError(
            f"rank {dist.get_rank()} could not measure with the others: {first_line}; another rank may be "
            "gone: look at its log"
        ) from error


def _rehearsed(cluster: Cluster) -> Cluster:
    """The cluster with its pace; every rank calls it."""
    if not cluster.cores or cluster.n_ranks < 2:
        return cluster
    with torch.random.fork_rng(devices=[]):
        found = _trained(cluster)
    gc.collect()  # all ranks leave the small pipeline now, and not one of them in a step of another
    return found


class _Block(nn.Module):
    """What most models are made of: products, attention, a normalisation, and a walk over the values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(3 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).transpose(1, 3).unbind(2)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        folded: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + folded


class _Model(nn.Module):
    """A part for each rank, all alike, and a loss that takes next to nothing."""

    def __init__(self, n_ranks: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(*(_Block() for _ in range(_BLOCKS))) for _ in range(n_ranks))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x.square().mean()


def _trained(cluster: Cluster) -> Cluster:
    """The cluster with what its ranks do between actions and beside them, and with their speed.

    That is what a step's parts say it takes over what it took, each typically in some turns; at most 1. Not
    of each turn: the machine's pace is another in its two halves.
    """
    torch.manual_seed(0)
    n = cluster.n_ranks
    model = _Model(n)
    batch = torch.randn(_MICROBATCHES * _ROWS, _TOKENS, _WIDTH, device="cpu")
    part = copy.deepcopy(model.parts[0])
    pins = {f"parts.{r}": r for r in range(n)}
    how: dict[str, Any] = {"cluster": cluster, "costs": "estimated", "pin": pins, "schedule": "1f1b"}
    pipe = split(model, n, (batch,), n_microbatches=_MICROBATCHES, **how)
    runtime = pipe.runtime()
    optimizer = torch.optim.SGD(runtime.parameters(), lr=0.0, momentum=0.9)
    for _ in range(_WARM):
        _stepped_s(runtime, optimizer, batch)
    alone: list[list[tuple[float, float]]] = []
    took: list[float] = []
    start_s = time.perf_counter()
    while not took or (len(took) < _TURNS and _slowest(time.perf_counter() - start_s) < _MOST_S):
        alone.append(_alone_s(part, batch[:_ROWS], cluster))
        took.append(_stepped_s(runtime, optimizer, batch))
    if cluster.crowd is None:  # else what lies between actions is a wait for a core, most of it
        cluster = _beside_actions(cluster, runtime.report())
    told = [_predicted_s(pipe.plan, cluster, seconds) for seconds in alone]
    speed = min(1.0, typical(told) / typical(took))
    return _each(cluster, lambda device: dataclasses.replace(device, speed=device.speed * speed))


def _each(cluster: Cluster, changed: Callable[[Device], Device]) -> Cluster:
    return dataclasses.replace(cluster, devices=tuple(map(changed, cluster.devices)))


def _beside_actions(cluster: Cluster, report: Report) -> Cluster:
    """The cluster with what a typical rank did between two actions, messages apart, and beside them all."""
    plan, n_actions = report.plan, [0] * report.plan.n_ranks
    worked_s = [0.0] * report.plan.n_ranks
    for rank, *_ in report.events:
        n_actions[rank] += 1
    for sent in report.messages:
        here, there = plan.placement[sent.source], plan.placement[sent.destination]
        worked_s[here] += plan.cluster.link(here, there).working_s(sent.n_bytes)
    ranks = zip(report.between_actions_s, worked_s, n_actions, strict=True)
    action_s = max(0.0, statistics.median(between - worked / n for between, worked, n in ranks))
    step_s = min(report.beside_actions_s)
    return _each(cluster, lambda device: dataclasses.replace(device, action_s=action_s, step_s=step_s))


def _alone_s(part: nn.Module, x: Tensor, cluster: Cluster) -> list[tuple[float, float]]:
    """Seconds of each stage's forward and backward, nothing in between, every core at it.

    The stages are alike and take the ranks' mean, but for the first: nobody wants its input's gradient.
    """
    places, rank = _places(cluster), dist.get_rank()
    for place in range(max(places) + 1):
        dist.barrier()
        if place == places[rank]:
            found = [*_timed_s(part, x, True), *_timed_s(part, x, False)]
    forward_s, backward_s, first_forward_s, first_backward_s = map(_mean, found)
    return [(first_forward_s, first_backward_s)] + [(forward_s, backward_s)] * (dist.get_world_size() - 1)


def _places(cluster: Cluster) -> list[int]:
    """When each rank has a core to itself, where a host's ranks take them in turns."""
    hosts = [cluster.host(rank) for rank in range(cluster.n_ranks)]
    return [hosts[:rank].count(host) // cluster.cores[host] for rank, host in enumerate(hosts)]


def _timed_s(part: nn.Module, x: Tensor, of_input: bool) -> tuple[float, float]:
    """This rank's seconds of a stage's forward and backward, with the gradient of its input or without."""
    x = x.clone().requires_grad_(of_input)
    seed = torch.ones_like(x)
    rows: list[tuple[float, float]] = []
    until_s = time.perf_counter() + _ALONE_S / 2
    while time.perf_counter() < until_s or len(rows) < 3:
        start = time.perf_counter()
        y = part(x)
        middle = time.perf_counter()
        y.backward(seed)
        rows.append((middle - start, time.perf_counter() - middle))
    forward_s, backward_s = (statistics.median(s) for s in zip(*rows, strict=True))
    return forward_s, backward_s


def _stepped_s(runtime: Runtime, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
    """Seconds of a step, of the rank that took longest."""
    optimizer.zero_grad()
    dist.barrier()
    start = time.perf_counter()
    runtime.step(batch)
    stepped_s = _slowest(time.perf_counter() - start)
    # what a step finds in the caches is what its optimizer has left there
    optimizer.step()
    return stepped_s


def _predicted_s(plan: Plan, cluster: Cluster, alone: Sequence[tuple[float, float]]) -> float:
    """A step of stages that take so long for their forward and backward, without an optimizer's."""
    stages = tuple(
        dataclasses.replace(s, forward_s=forward_s, backward_s=backward_s)
        for s, (forward_s, backward_s) in zip(plan.stages, alone, strict=True)
    )
    return simulate(dataclasses.replace(plan, stages=stages, cluster=cluster)).before_optimizer_s


def _slowest(seconds: float) -> float:
    """The most that any rank has; the same on every rank."""
    return _reduced(seconds, dist.ReduceOp.MAX)


def _mean(seconds: float) -> float:
    return _reduced(seconds, dist.ReduceOp.SUM) / dist.get_world_size()


def _reduced(seconds: float, how: dist.ReduceOp.RedOpType) -> float:
    found = torch.tensor([seconds], dtype=torch.float64, device="cpu")
    dist.all_reduce(found, how)
    return float(found)


def _main(init_method: str, n_ranks: str, out: str, rank: str) -> None:
    with job_group(init_method, int(rank), int(n_ranks)):
        cluster = _rehearsed(measure.probe())
    if int(rank) == 0:
        pathlib.Path(out).write_text(json.dumps(cluster.to_dict()))


if __name__ == "__main__":
    _main(*sys.argv[1:])
