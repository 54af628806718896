"""What several ranks on one card measure: parity with the plain model, and memory predicted and held.

``python -m benchmarks.gpu.ranks DEVICE SIZE`` is one rank; rank 0 prints one JSON line. All ranks share the
card, so messages go by way of the host: numbers are right, times are not those of a card for each.
"""

from __future__ import annotations

import copy
import datetime
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopipe
from autopipe.runtime import Runtime

from ..runtime import models
from .sizes import SIZES, Size, device_of

__all__ = ["main"]

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zbv": 2, "dualpipev": 2}


def parity(size: Size, device: torch.device) -> dict[str, Any]:
    """By schedule: how far the loss and the gradients are from the plain model's, relative to the largest."""
    torch.manual_seed(1)
    model = models.language_model(**size.model)
    x = torch.randint(size.vocab, (size.rows, size.length))
    target = x.roll(-1, 1)
    plain = copy.deepcopy(model).to(device)
    loss = models.loss(plain(x.to(device)), target.to(device))
    loss.backward()
    found = {}
    for schedule, per_rank in SCHEDULES.items():
        n_stages = per_rank * dist.get_world_size()
        if n_stages > len(model.layers):
            continue
        cuts = [i * len(model.layers) // n_stages for i in range(1, n_stages)]
        piece = x[: size.rows // size.n_microbatches]
        made = models.split(
            copy.deepcopy(model), piece, cuts, dist.get_world_size(), schedule, size.n_microbatches
        )
        runtime = Runtime(*made, loss_fn=models.loss, device=device)
        error = abs(runtime.step(x, target=target).loss.item() - loss.item()) / abs(loss.item())
        errors = [
            ((p.grad - wanted).abs().max() / wanted.abs().max()).item()
            for name, p in runtime.named_parameters()
            if (wanted := plain.get_parameter(name).grad) is not None and p.grad is not None
        ]
        found[schedule] = {"loss": error, "gradients": _largest(max(errors))}
    return found


def memory(size: Size, device: torch.device) -> dict[str, Any]:
    """By rank: bytes the plan predicts for the rank's stages, and the most its allocator held.

    The model has no memory but that of each rank's stages: recording it whole would take the host minutes.
    """
    torch.manual_seed(1)
    with torch.device("meta"):
        model = models.language_model(**size.model)
    x = torch.randint(size.vocab, (size.rows, size.length))
    options = {"n_microbatches": size.n_microbatches, "costs": "estimated", "device": "H200"}
    pipe = autopipe.split(model, dist.get_world_size(), (x,), **options)
    runtime = pipe.runtime(loss_fn=models.loss, device=device, weights=_fill)
    for _ in range(3):
        runtime.step(x, target=x.roll(-1, 1))
    report = runtime.report()
    predicted = [
        sum(s.memory_bytes for s in pipe.plan.stages if s.rank == rank) for rank in range(pipe.plan.n_ranks)
    ]
    return {"predicted_bytes": predicted, "held_bytes": list(report.peak_bytes)}


def _fill(module: nn.Module, path: str) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.normal_(tensor, std=0.02)


def _largest(value: float) -> float:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return max(everyone)


def main(kind: str, size: str) -> None:
    """Measure; rank 0 prints."""
    device = device_of(kind)
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    exact = SIZES["tiny" if size == "tiny" else "exact"]
    found = {"parity": parity(exact, device), "memory": memory(SIZES[size], device)}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # a simulated device's threads may still hold what a runtime left


if __name__ == "__main__":
    main(*sys.argv[1:])
