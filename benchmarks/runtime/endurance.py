"""Whether memory grows over thousands of steps: resident bytes and live tensors at given steps, per rank.

Starting the ranks is left to ``ranks``, summarising to ``__main__``.
"""

from __future__ import annotations

import gc
import pathlib
import resource
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopipe.runtime import Runtime

from . import models


class Tiny(models.Chain):
    """Small layers with what leaks easily: batch norm, dropout, and a weight used at both ends."""

    def __init__(self, d: int = 8) -> None:
        super().__init__([nn.Linear(d, d), nn.BatchNorm1d(d), nn.Dropout(0.1), nn.Linear(d, d)])
        self.layers[3].weight = self.layers[0].weight


def resident_bytes() -> int:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


def endurance(*, schedule: str, marks: list[int]) -> list[dict[str, Any]]:
    """Train with an optimizer and ragged batches; per rank what was resident and alive after each mark."""
    torch.manual_seed(0)
    made = models.split(Tiny(), torch.randn(4, 8), [2], 2, schedule, 4)
    runtime = Runtime(*made, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(runtime.parameters(), 1e-3, momentum=0.9)
    batches = [torch.randn(rows, 8) for rows in (8, 9, 12, 10)]
    found = []
    for step in range(1, marks[-1] + 1):
        x = batches[step % len(batches)]
        optimizer.zero_grad()
        runtime.step(x, target=x)
        optimizer.step()
        if step in marks:
            found.append({"step": step, "resident_bytes": resident_bytes(), "tensors": live_tensors()})
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return everyone
