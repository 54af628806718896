"""Times an optimizer's step: what each parameter costs, however small, and what each byte of it does.

What a stage's own step costs then is left to ``simulator``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .account import Counter
from .clock import Stopwatch

__all__ = ["optimizer_cost"]

_SAMPLE_BYTES = 1 << 26
"""Parameters that are stepped: enough to be out of any cache with their gradients and moments."""
_EVICTING_BYTES = 1 << 26
_N_SMALL = 24
_ROUNDS = 5


def optimizer_cost(
    optimizer: type[torch.optim.Optimizer], parameters: Sequence[nn.Parameter], device: torch.device
) -> tuple[float, float, int]:
    """One optimizer step on parameters of the model's own shapes, the largest first.

    Returns its seconds per parameter byte, those per parameter beside that, and the bytes it needs above
    weights, gradients and state. Between two steps the caches hold something else, as they do in training.
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
        """Of a step, the least: others on the machine make it longer, never shorter."""
        found = []
        for _ in range(_ROUNDS):
            self._other.add_(1)
            with self._watch("step"):
                self.step()
            found.append(self._watch.read()["step"])
        return min(found)
