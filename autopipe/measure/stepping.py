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

from .account import Counter
from .busy_cores import busy
from .clock import Stopwatch

__all__ = ["beginning_s", "optimizer_cost"]

_SAMPLE_BYTES = 1 << 26
"""Parameters that are stepped: enough to be out of any cache with their gradients and moments."""
_EVICTING_BYTES = 1 << 26
_N_SMALL = 24
_ROUNDS = 9


def beginning_s(begin: Callable[[], object]) -> float:
    """Seconds of what a step begins with, once the last step has left nothing of it in any cache."""
    other = torch.zeros(_EVICTING_BYTES, dtype=torch.uint8, device="cpu")
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
    n_peers: int = 0,
) -> tuple[float, float, int]:
    """One optimizer step on parameters of the model's own shapes, the largest first.

    Returns its seconds per parameter byte, those per parameter beside that, and the bytes it needs above
    weights, gradients and state. Between two steps the caches hold something else, as they do in training,
    and as many peers step meanwhile: ranks come to their optimizers at about the same time.
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
    of_one = _Stepped(optimizer, small, device).seconds() / _N_SMALL
    every = _Stepped(optimizer, chosen, device)
    with busy(every.step, n_peers, device):
        seconds = max(every.seconds() - len(chosen) * of_one, 0.0)
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
        self._other = torch.zeros(_EVICTING_BYTES, dtype=torch.uint8, device=device)
        self.step()

    def seconds(self) -> float:
        """Of a step, the median."""
        found = []
        for _ in range(_ROUNDS):
            self._other.add_(1)
            with self._watch("step"):
                self.step()
            found.append(self._watch.read()["step"])
        return statistics.median(found)
