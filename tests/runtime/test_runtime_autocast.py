"""A model that goes by dtypes is captured within the autocast of its runtime, or recorded once more."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopipe


class Typed(nn.Module):
    """Asks for the dtype of what its first layer gives; ``makes`` something of it."""

    def __init__(self, makes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.makes = makes

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x)
        if self.makes:
            y = y * torch.full((8,), 1 / 3, dtype=y.dtype)
        elif y.dtype is torch.float64:
            y = y * 2
        for layer in self.layers[1:]:
            y = torch.tanh(layer(y))
        return y


def loss_of(model: nn.Module, within: Any) -> float:
    """Of one step under autocast to bfloat16, captured ``within`` a context."""
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(4, 8, generator=generator) for _ in range(2))
    with within:
        pipe = autopipe.split(model, 1, (x,))
    runtime = pipe.runtime(loss_fn=F.mse_loss, autocast=torch.bfloat16)
    return float(runtime.step(x, target=target).loss)


def expected(model: nn.Module) -> float:
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(4, 8, generator=generator) for _ in range(2))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    return float(F.mse_loss(out.float(), target))


def test_a_dtype_that_makes_no_difference_is_of_no_account() -> None:
    model = Typed(False)
    assert loss_of(model, contextlib.nullcontext()) == pytest.approx(expected(model), rel=1e-2)


@pytest.mark.parametrize("within", [contextlib.nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_a_dtype_that_does_is_right_captured_within_or_not(within: Any) -> None:
    model = Typed(True)
    found = expected(model)
    assert loss_of(model, within()) == pytest.approx(found, rel=1e-6)
