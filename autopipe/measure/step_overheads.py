"""Times what a step does beside its actions: the optimizer, by parameter and by byte, and its beginning.

What a stage's own step costs then is left to ``simulator``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .busy_cores import busy
from .kernel_counts import Counter
from .timers import Stopwatch

__all__ = ["beginning_s", "optimizer_cost", "passed_between"]

_SAMPLE_BYTES = 1 << 26
"""Parameters that are stepped: enough to be out of any cache with their gradients and moments."""
_EVICTED_BYTES = 1 << 23, 1 << 26
"""At least and at most so much passes through the caches between two steps: more than a core's own hold, and
more than any holds."""
_N_SMALL = 24
_ROUNDS = 9


def passed_between(touched_bytes: int, device: torch.device) -> Tensor:
    """What stands for all that a step touches; to write to it evicts what is timed next."""
    least, most = _EVICTED_BYTES
    return torch.zeros(min(max(least, touched_bytes), most), dtype=torch.uint8, device=device)


def beginning_s(begin: Callable[[], object], touched_bytes: int) -> float:
    """Seconds of what a step begins with, after ``touched_bytes`` of others passed through the caches."""
    other = passed_between(touched_bytes, torch.device("cpu"))
    found = []
    for _ in range(_ROUNDS):
        other.add_(1)
        start = time.perf_counter()
        begin()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def optimizer_cost(
    optimizer: type[torch.optim.Optimizer],
    parameters: Sequence[nn.Parameter],
    device: torch.device,
    touched_bytes: int,
    n_peers: int = 0,
) -> tuple[float, float, int]:
    """One optimizer step on parameters of the model's own shapes, the largest first.

    Returns its seconds per parameter byte, those per parameter beside that, and the bytes it needs above
    weights, gradients and state. Before each step ``touched_bytes`` of other data pass through the caches, as
    forward and backward do in training. ``n_peers`` processes step at the same time, as other ranks do.
    """
    chosen: list[nn.Parameter] = []
    total = 0
    for p in sorted(parameters, key=lambda p: p.nbytes, reverse=True):
        if not total or total + p.nbytes <= _SAMPLE_BYTES:
            chosen.append(p)
            total += p.nbytes
    if not chosen:
        return 0.0, 0.0, 0
    small = [torch.zeros(1, dtype=chosen[0].dtype, device=device)] * _N_SMALL
    other = passed_between(touched_bytes, device)
    of_one = _Stepped(optimizer, small, device).seconds(other) / _N_SMALL
    every = _Stepped(optimizer, chosen, device)
    with busy(lambda *_: every.step(), n_peers, device):
        seconds = max(every.seconds(other) - len(chosen) * of_one, 0.0)
    with Counter() as counter:
        every.step()
    return seconds / total, of_one, counter.peak_bytes


class _Stepped:
    """Parameters like some tensors, with gradients, and an optimizer of theirs that has its state."""

    def __init__(
        self, optimizer: type[torch.optim.Optimizer], like: Sequence[Tensor], device: torch.device
    ) -> None:
        made = [nn.Parameter(torch.empty_like(p, device=device).normal_()) for p in like]
        for p in made:
            p.grad = torch.ones_like(p)
        self.step: Any = optimizer(made, lr=1e-3).step  # type: ignore[call-arg]
        self._watch = Stopwatch(device)
        self.step()

    def seconds(self, other: Tensor) -> float:
        """Of a step, the median; before each, ``other`` passes through the caches."""
        found = []
        for _ in range(_ROUNDS):
            other.add_(1)
            with self._watch("step"):
                self.step()
            found.append(self._watch.read()["step"])
        return statistics.median(found)
