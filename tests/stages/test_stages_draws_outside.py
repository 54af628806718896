"""What draws from Python's or numpy's generator does not run again in backward, with other numbers."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import autopipe
from autopipe.errors import InputError


class Dropping(nn.Module):
    """Leaves out layers by a generator that is not torch's."""

    def __init__(self, draw):
        super().__init__()
        self.first, self.layers = nn.Linear(6, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.draw = draw

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            if not self.training or self.draw() > 0.5:
                x = x + layer(x).tanh()
        return x


def by_python():
    return random.random()


def by_numpy():
    return np.random.uniform()


def split(model, **options):
    x = torch.randn(4, 6, dtype=torch.float64)
    return x, autopipe.split(model.double(), 2, (x,), n_microbatches=2, costs="estimated", **options)


@pytest.mark.parametrize("draw", [by_python, by_numpy])
def test_layers_left_out_by_other_generators_are_not_recomputed(draw):
    with pytest.raises(InputError, match=r"draws from Python's or numpy's generator at .*recompute='never'"):
        split(Dropping(draw), recompute="always")
    x, pipe = split(Dropping(draw))
    assert pipe.runtime(nn.functional.mse_loss).step(x, target=x).loss.isfinite()


def test_layers_left_out_by_torch_are():
    model = Dropping(lambda: torch.rand(()))
    x, pipe = split(model, recompute="always")
    assert pipe.runtime(nn.functional.mse_loss).step(x, target=x).loss.isfinite()
