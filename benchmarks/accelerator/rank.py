"""One rank of a comparison on the simulated accelerator; prints what it found as one JSON line.

Starting the ranks is left to ``__main__``.
"""

from __future__ import annotations

import copy
import datetime
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from autopipe.runtime import Runtime

from ..runtime import models

__all__ = ["main"]

N_MICROBATCHES, D, ROWS, LENGTH = 8, 32, 16, 8
WARM_UP, LOOKED_AT = 5, 3


def ours(rank: int, device: torch.device, cuts: list[int], schedule: str) -> Callable[[], Any]:
    x, target = batch()
    model = models.transformer(8, D)
    made = models.split(
        copy.deepcopy(model),
        x[: ROWS // N_MICROBATCHES],
        cuts,
        dist.get_world_size(),
        schedule,
        N_MICROBATCHES,
    )
    runtime = Runtime(*made, loss_fn=models.loss, device=device)
    return lambda: runtime.step(x, target=target)


def torchs(rank: int, device: torch.device, cuts: list[int], schedule: str) -> Callable[[], Any]:
    x, target = (t.to(device) for t in batch())
    model, n_ranks = models.transformer(8, D), dist.get_world_size()
    edges = [0, *cuts, len(model.layers)]
    pieces = [models.Chain(list(model.layers[a:b])) for a, b in itertools.pairwise(edges)]
    stages = [
        PipelineStage(piece.to(device), s, len(pieces), device)
        for s, piece in enumerate(pieces)
        if s % n_ranks == rank
    ]
    if schedule == "1f1b":
        runner: Any = Schedule1F1B(stages[0], N_MICROBATCHES, models.loss, scale_grads=True)
    else:
        runner = ScheduleInterleaved1F1B(stages, N_MICROBATCHES, models.loss, scale_grads=True)

    def step() -> None:
        given = (x,) if rank == 0 else ()
        wanted: dict[str, Any] = {"target": target, "losses": []} if rank == n_ranks - 1 else {}
        runner.step(*given, **wanted)

    return step


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, LENGTH, D), torch.randn(ROWS, LENGTH, D)


def look(step: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """What a step after the warm-up does, on average over some."""
    import simulated
    import simulated.group

    for _ in range(WARM_UP):
        step()
    torch.accelerator.synchronize(device)
    simulated.take_races()
    sent, waits = simulated.group.bytes_sent[0], Counter[str]()
    for _ in range(LOOKED_AT):
        with simulated.waits("/") as found:
            step()
        for (what, place), n in found.items():
            waits[f"{what} at {'/'.join(place.split('/')[-3:])}"] += n
        torch.accelerator.synchronize(device)
    return {
        "host_waits": sum(waits.values()) / LOOKED_AT,
        "where": dict(waits),
        "races": len(simulated.take_races()),
        "bytes_sent": (simulated.group.bytes_sent[0] - sent) / LOOKED_AT,
    }


def main(who: str, schedule: str, *cuts: str) -> None:
    """Run one contender; every rank prints a line."""
    import simulated
    import simulated.group

    rank = int(os.environ["RANK"])
    device = torch.device("sim", rank)
    torch.accelerator.set_device_index(rank)
    dist.init_process_group("simccl", timeout=datetime.timedelta(seconds=60))
    with simulated.settings(races=1):
        found = look(
            {"ours": ours, "torch": torchs}[who](rank, device, [int(c) for c in cuts], schedule), device
        )
    print(json.dumps(found), flush=True)
    store: Any = dist.distributed_c10d._get_default_store()
    store.set(f"done {rank}", "")
    if rank == 0:
        store.wait([f"done {r}" for r in range(dist.get_world_size())])
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
