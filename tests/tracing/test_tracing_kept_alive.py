"""How much of what backwards need a capture holds at a time, beside what a step of the model holds."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from autopipe.tracing import capture
from autopipe.tracing.rows import affordable


class Saved:
    """The bytes that are saved for backwards: now, and the most there were."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def pack(self, tensor: Tensor) -> Any:
        return _Held(self, tensor.detach())

    def unpack(self, held: Any) -> Tensor:
        return held.tensor


class _Held:
    def __init__(self, saved: Saved, tensor: Tensor) -> None:
        self.saved, self.tensor = saved, tensor
        saved.now += tensor.nbytes
        saved.most = max(saved.most, saved.now)

    def __del__(self) -> None:
        self.saved.now -= self.tensor.nbytes


class Blocks(nn.Module):
    """Layers that may ask whether gradients are made, as those of libraries do that may recompute."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(6))
        self.asks, self.checkpoints = asks, False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            if self.asks and torch.is_grad_enabled() and self.checkpoints:
                raise NotImplementedError
            x = x + torch.tanh(layer(x))
        return F.mse_loss(x, y)


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("n_rows", [8, 16])
def test_no_more_is_held_than_a_step_holds(asks: bool, n_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affordable, "_LITTLE_BYTES", 1)
    torch.manual_seed(0)
    model, saved = Blocks(asks), Saved()
    x, y = torch.randn(2, n_rows, 4, 32, 32)
    with saved_tensors_hooks(saved.pack, saved.unpack):
        model(x, y).backward()
    of_step, saved.most = saved.most, 0
    with saved_tensors_hooks(saved.pack, saved.unpack):
        captured = capture(model, (x, y))
    assert 0 < saved.most <= 2 * of_step
    gc.collect()
    assert saved.now == 0
    assert captured.variation.takes_rows(n_rows)
