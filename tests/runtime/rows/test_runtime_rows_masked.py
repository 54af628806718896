"""What models put where they mask out, as -inf in logits, hides nothing of what is beside it."""

import pytest
import torch
from splitting import split_by_layers
from torch import nn

from autopipe.tracing import capture
from autopipe.tracing.sizes.variation import Mixing
from autopipe.tracing.state.example_data import close_to

FILLS = [-1e9, float("-inf"), torch.finfo(torch.float32).min]


class Masking(nn.Module):
    """Logits of which the last is never to be chosen; told beside one another, or each for itself."""

    def __init__(self, fill, put, *, mixes):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.fill, self.put, self.mixes = fill, put, mixes

    def forward(self, x):
        told = self.b(self.a(x).relu())
        told = told - told.mean(0, keepdim=True) if self.mixes else told
        return self.put(told, torch.tensor([False, False, False, True]), self.fill)


def _filled(told, mask, fill):
    return told.masked_fill(mask, fill)


def _added(told, mask, fill):
    return told + torch.zeros(4).to(told).masked_fill(mask, fill)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("put", [_filled, _added])
@pytest.mark.parametrize("fill", FILLS)
def test_rows_that_mix_beside_what_is_masked_out_are_given_the_whole_batch(fill, put, dtype):
    torch.manual_seed(0)
    model, x = Masking(fill, put, mixes=True).to(dtype), torch.randn(4, 4, dtype=dtype)
    pipe = split_by_layers(model, 2, (x,), n_microbatches=2)
    assert pipe.graph.ops.tail
    alone = Masking(fill, put, mixes=False).to(dtype)
    assert capture(alone, (x,)).variation.mixing == Mixing()


@pytest.mark.parametrize("fill", FILLS)
def test_values_are_compared_beside_what_is_masked_out(fill):
    told = torch.tensor([0.5, -0.25, fill])
    assert close_to(told, told * torch.tensor([1 + 1e-6, 1.0, 1.0]))
    assert not close_to(told, told * torch.tensor([1.5, 1.0, 1.0]))


def test_one_that_is_large_and_differs_is_no_fill():
    told = torch.tensor([0.5, -0.25, 1e9])
    assert not close_to(told, told * torch.tensor([1.0, 1.0, 1.01]))
