"""What each rank measures: our runtime, torch's schedules and a hand-written loop on the same split.

Starting the ranks is left to ``ranks``, summarising to ``__main__``.
"""

from __future__ import annotations

import contextlib
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from autopipe.runtime import Runtime

from . import models
from .endurance import endurance  # noqa: F401 - found by its name, as those below
from .exactness import exactness  # noqa: F401 - same


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def ours(model: models.Chain, x: torch.Tensor, target: torch.Tensor, cuts: list[int], schedule: str, m: int):
    n_ranks = dist.get_world_size()
    made = models.split(copy.deepcopy(model), x[: len(x) // m], cuts, n_ranks, schedule, m)
    runtime = Runtime(*made, loss_fn=mse)
    return lambda: runtime.step(x, target=target), list(runtime.parameters())


def torchs(
    model: models.Chain, x: torch.Tensor, target: torch.Tensor, cuts: list[int], schedule: str, m: int
):
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    own = copy.deepcopy(model)
    edges = [0, *cuts, len(own.layers)]
    n_stages = len(edges) - 1
    pieces = {
        s: nn.Sequential(*own.layers[edges[s] : edges[s + 1]]) for s in range(n_stages) if s % n_ranks == rank
    }
    stages = [PipelineStage(p, s, n_stages, torch.device("cpu")) for s, p in pieces.items()]
    if schedule == "1f1b":
        runner: Any = Schedule1F1B(stages[0], m, mse, scale_grads=True)
    else:
        runner = ScheduleInterleaved1F1B(stages, m, mse, scale_grads=True)

    def step() -> None:
        if rank == 0 and rank == n_ranks - 1:
            runner.step(x, target=target)
        elif rank == 0:
            runner.step(x)
        elif rank == n_ranks - 1:
            runner.step(target=target, losses=[])
        else:
            runner.step()

    return step, [p for piece in pieces.values() for p in piece.parameters()]


def by_hand(
    model: models.Chain, x: torch.Tensor, target: torch.Tensor, cuts: list[int], schedule: str, m: int
):
    """The least code that runs 1F1B on two ranks."""
    rank = dist.get_rank()
    own = copy.deepcopy(model)
    edges = [0, *cuts, len(own.layers)]
    piece = nn.Sequential(*own.layers[edges[rank] : edges[rank + 1]])
    xs, ts = x.chunk(m), target.chunk(m)
    shape = piece(xs[0]).shape if rank == 0 else models.Chain(list(own.layers[: edges[1]]))(xs[0]).shape

    def first() -> None:
        outs, sends = [], []

        def forward(i: int) -> None:
            outs.append(piece(xs[i]))
            sends.append(dist.isend(outs[i].detach(), 1))

        def backward(i: int) -> None:
            grad = torch.empty(shape)
            dist.recv(grad, 1)
            outs[i].backward(grad)
            outs[i] = None

        forward(0)
        for i in range(1, m):
            forward(i)
            backward(i - 1)
        backward(m - 1)
        for send in sends:
            send.wait()

    def last() -> None:
        sends = []
        buffer = torch.empty(shape)
        coming = dist.irecv(buffer, 0)
        for i in range(m):
            coming.wait()
            given = buffer.requires_grad_()
            if i + 1 < m:
                buffer = torch.empty(shape)
                coming = dist.irecv(buffer, 0)
            (mse(piece(given), ts[i]) / m).backward()
            sends.append(dist.isend(given.grad, 0))
        for send in sends:
            send.wait()

    return (first if rank == 0 else last), list(piece.parameters())


RUNNERS: dict[str, Callable[..., Any]] = {"ours": ours, "torch": torchs, "by hand": by_hand}


def compare(
    *,
    model: str,
    options: dict[str, Any],
    width: int,
    length: int,
    rows: int,
    cuts: dict[str, list[int]],
    schedule: str,
    n_microbatches: int,
    runners: list[str],
    repeats: int,
    steps: int,
    out_width: int | None = None,
) -> dict[str, Any]:
    """Seconds and CPU seconds per step of each runner, in turns: ``repeats`` rounds of ``steps`` steps."""
    torch.manual_seed(1)
    plain = getattr(models, model)(**options)
    shape = (rows, length, width) if length else (rows, width)
    x = torch.randn(shape)
    target = torch.randn(*shape[:-1], out_width or width)
    made = {
        name: RUNNERS[name.split("@")[0]](plain, x, target, cuts[name], schedule, n_microbatches)
        for name in runners
    }
    wall: dict[str, list[float]] = {name: [] for name in runners}
    cpu: dict[str, list[float]] = {name: [] for name in runners}
    for turn in range(repeats + 1):
        for name, (step, parameters) in made.items():
            dist.barrier()
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step()
                for p in parameters:
                    p.grad = None
            spent_cpu_s = time.process_time() - start_cpu_s
            dist.barrier()
            spent_s = time.perf_counter() - start_s
            both = torch.tensor([spent_cpu_s])
            dist.all_reduce(both)
            if turn:  # the first round warms up
                wall[name].append(spent_s / steps)
                cpu[name].append(both.item() / steps)
    return {"wall_s": wall, "cpu_s": cpu}


def against_ceiling(*, n_microbatches: int, repeats: int, steps: int) -> dict[str, Any]:
    """Our 1F1B step of the transformer, and the same compute on both ranks at once with no communication."""
    torch.manual_seed(1)
    plain = models.transformer()
    x, target = torch.randn(32, 128, 256), torch.randn(32, 128, 256)
    step, parameters = ours(plain, x, target, [4], "1f1b", n_microbatches)
    rank = dist.get_rank()
    piece = nn.Sequential(*copy.deepcopy(plain).layers[4 * rank : 4 * rank + 4])
    pieces, targets = x.chunk(n_microbatches), target.chunk(n_microbatches)

    def compute() -> None:
        for part, wanted in zip(pieces, targets, strict=True):
            given = part.detach().requires_grad_(rank > 0)
            out = piece(given)
            if rank == 0:
                out.backward(part)
            else:
                (mse(out, wanted) / n_microbatches).backward()

    runs = {"ours": (step, parameters), "ceiling": (compute, list(piece.parameters()))}
    wall: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, (run, own) in runs.items():
            dist.barrier()
            start_s = time.perf_counter()
            for _ in range(steps):
                run()
                for p in own:
                    p.grad = None
            dist.barrier()
            if turn:
                wall[name].append((time.perf_counter() - start_s) / steps)
    return {"wall_s": wall}


def in_process(
    *, rows: int, length: int, width: int, n_microbatches: int, repeats: int, steps: int
) -> dict[str, Any]:
    """All stages in one process against the plain model with gradient accumulation."""
    plain = models.transformer()
    x, target = torch.randn(rows, length, width), torch.randn(rows, length, width)
    made = models.split(copy.deepcopy(plain), x[: rows // n_microbatches], [4], 2, "1f1b", n_microbatches)
    runtime = Runtime(*made, loss_fn=mse)

    def accumulate() -> None:
        for xs, ts in zip(x.chunk(n_microbatches), target.chunk(n_microbatches), strict=True):
            (mse(plain(xs), ts) / n_microbatches).backward()

    runs = {
        "ours": (lambda: runtime.step(x, target=target), list(runtime.parameters())),
        "plain": (accumulate, list(plain.parameters())),
    }
    wall: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, (step, parameters) in runs.items():
            start_s = time.perf_counter()
            for _ in range(steps):
                step()
                for p in parameters:
                    p.grad = None
            if turn:
                wall[name].append((time.perf_counter() - start_s) / steps)
    return {"wall_s": wall}


def layer_seconds(
    *, model: str, options: dict[str, Any], width: int, length: int, rows: int
) -> dict[str, Any]:
    """Measured forward + backward of each layer alone on one microbatch, both ranks at it."""
    plain = getattr(models, model)(**options)
    x = torch.randn(rows, length, width)
    seconds = []
    for layer in plain.layers:
        times = []
        for _ in range(6):
            given = x.detach().requires_grad_()
            start_s = time.perf_counter()
            out = layer(given)
            out.backward(torch.ones_like(out))
            times.append(time.perf_counter() - start_s)
        seconds.append(statistics.median(times[1:]))
    both = torch.tensor(seconds)
    dist.all_reduce(both)
    return {"seconds": (both / dist.get_world_size()).tolist()}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    name, options, out = sys.argv[1:]
    found = globals()[name](**json.loads(options))
    if dist.get_rank() == 0:
        with open(out, "w") as file:  # noqa: PTH123 - a temporary file that the launcher opened
            json.dump(found, file)
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
