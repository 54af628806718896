"""A model of which all takes the whole batch: nothing is left to run on microbatches."""

from __future__ import annotations

import copy

import pytest
import torch
from splitting import split_by_layers
from torch import Tensor, nn

from autopipe.errors import InputError


class Carrying(nn.Module):
    """Goes by a scale that each call moves, from its first op on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(0.9)
        value, pull = torch.func.vjp(lambda t: self.first(t).tanh() * self.scale, x)
        return self.last(value + pull(value)[0]).square().mean()


def test_a_model_of_which_all_takes_the_whole_batch_is_refused_in_microbatches():
    """The end that takes all of them would wait for what no microbatch gives."""
    torch.manual_seed(0)
    model, x = Carrying().double(), torch.randn(6, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    runtime = split_by_layers(model, 1, (x,), n_microbatches=3).runtime()
    with pytest.raises(InputError, match=r"one call leaves scale for the next.*pass n_microbatches=1"):
        runtime.step(x)
    loss = plain(x)
    loss.backward()
    found = runtime.step(x, n_microbatches=1).loss
    assert float(found) == pytest.approx(loss.item(), rel=1e-12)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
