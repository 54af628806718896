"""What one process measures on one device: the profiler's word, our step beside torch's, the host's waits.

``python -m benchmarks.gpu.alone DEVICE SIZE`` prints one JSON line. Ranks are left to ``ranks``.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

import autopipe
from autopipe import accelerator
from autopipe.runtime import Runtime

from ..runtime import models
from .sizes import SIZES, Size, device_of

__all__ = ["main"]

N_STAGES = 2


def profiled(size: Size, device: torch.device) -> dict[str, Any]:
    """Stages' predicted seconds beside those measured in training, and the profile's own length."""
    model, x, target = _made(size, device)
    began = time.perf_counter()
    pipe = autopipe.split(
        model, N_STAGES, (x,), n_microbatches=size.n_microbatches, n_ranks=N_STAGES, costs="measured"
    )
    profile_s = time.perf_counter() - began
    runtime = pipe.runtime(loss_fn=models.loss, device=device)
    for _ in range(3 + size.steps):
        _zero(runtime.parameters())
        runtime.step(x, target=target)
    report = runtime.report()
    stages = [
        {"stage": s.index, "predicted_s": sum(s.predicted.values()), "measured_s": sum(s.measured.values())}
        for s in report.stages
    ]
    return {
        "profile_s": profile_s,
        "stages": stages,
        "predicted_step_s": report.predicted_step_s,
        "measured_step_s": report.measured_step_s,
    }


def compared(size: Size, device: torch.device) -> dict[str, Any]:
    """Seconds, the host's seconds and its waits per step: ours, torch's interleaved 1F1B, the plain model.

    Both pipelines have their two stages in this process, as a card of its own for each is not to be had.
    """
    model, x, target = _made(size, device)
    contenders = {
        "ours": _ours(copy.deepcopy(model), x, target, size, device),
        "torch": _torchs(copy.deepcopy(model), x, target, size, device),
        "plain": _plain(copy.deepcopy(model), x, target, size),
    }
    found: dict[str, dict[str, list[float]]] = {
        name: {"step_s": [], "host_s": [], "waits": []} for name in contenders
    }
    for step, parameters in contenders.values():
        for _ in range(3):
            _zero(parameters)
            step()
    names = list(contenders)
    for turn in range(size.rounds):
        for name in names if turn % 2 else reversed(names):
            for key, value in _timed(*contenders[name], size.steps, device).items():
                found[name][key].append(value)
    return {n: {k: statistics.median(v) for k, v in columns.items()} for n, columns in found.items()}


def _made(size: Size, device: torch.device) -> tuple[models.Chain, Tensor, Tensor]:
    torch.manual_seed(1)
    model = models.language_model(**size.model).to(device)
    x = torch.randint(size.vocab, (size.rows, size.length)).to(device)
    return model, x, x.roll(-1, 1)


def _zero(parameters: Any) -> None:
    for parameter in parameters:
        parameter.grad = None


Contender = tuple[Callable[[], object], list[nn.Parameter]]


def _ours(model: models.Chain, x: Tensor, target: Tensor, size: Size, device: torch.device) -> Contender:
    cut = len(model.layers) // 2
    made = models.split(model, x[: len(x) // size.n_microbatches], [cut], 2, "1f1b", size.n_microbatches)
    runtime = Runtime(*made, loss_fn=models.loss, device=device)
    return lambda: runtime.step(x, target=target), list(runtime.parameters())


def _torchs(model: models.Chain, x: Tensor, target: Tensor, size: Size, device: torch.device) -> Contender:
    cut = len(model.layers) // 2
    pieces = [models.Chain(list(part)) for part in (model.layers[:cut], model.layers[cut:])]
    stages = [PipelineStage(piece, i, len(pieces), device) for i, piece in enumerate(pieces)]
    runner = ScheduleInterleaved1F1B(stages, size.n_microbatches, models.loss, scale_grads=True)
    return lambda: runner.step(x, target=target, losses=[]), list(model.parameters())


def _plain(model: models.Chain, x: Tensor, target: Tensor, size: Size) -> Contender:
    def step() -> None:
        pieces = zip(x.chunk(size.n_microbatches), target.chunk(size.n_microbatches), strict=True)
        for part, wanted in pieces:
            (models.loss(model(part), wanted) / size.n_microbatches).backward()

    return step, list(model.parameters())


def _timed(
    step: Callable[[], object], parameters: list[nn.Parameter], n: int, device: torch.device
) -> dict[str, float]:
    accelerator.synchronize(device)
    # of the whole process: an accelerator's backward is launched by threads of autograd's own
    began, host_began = time.perf_counter(), time.process_time()
    with _waits(device) as waits:
        for _ in range(n):
            _zero(parameters)
            step()
    host_s = time.process_time() - host_began
    accelerator.synchronize(device)
    return {"step_s": (time.perf_counter() - began) / n, "host_s": host_s / n, "waits": sum(waits) / n}


@contextmanager
def _waits(device: torch.device) -> Iterator[list[int]]:
    """Counts what makes the host wait for the device within it, as the device's own module tells it."""
    counted: list[int] = []
    if device.type == "sim":
        import simulated

        with simulated.waits("/") as found:
            yield counted
        counted += found.values()
    elif device.type == "cuda":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield counted
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counted.append(sum("called a synchronizing" in str(w.message) for w in caught))
    else:
        yield counted


def main(kind: str, size: str) -> None:
    """Measure and print."""
    device = device_of(kind)
    if device.type != "cpu":
        torch.accelerator.set_device_index(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    given = SIZES[size]
    found = {
        "device": accelerator.name(device),
        "torch": torch.__version__,
        "profiled": profiled(given, device),
        "compared": compared(given, device),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
