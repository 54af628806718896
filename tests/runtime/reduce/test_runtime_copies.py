"""What several ranks have a copy of is written to by none of them alone without a word."""

import pytest
import torch
from torch import nn

import autopipe
from autopipe.errors import StepError
from autopipe.runtime.stage.written_copies import Copies


class Shared(nn.Module):
    """A scale and a weight that its first and its last layer use."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("scale", torch.ones(4))
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x):
        x = x * self.scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


@pytest.mark.parametrize("name", ["scale", "layers.0.weight"])
def test_what_one_rank_wrote_to_is_told(name):
    model = Shared()
    stages = autopipe.split(
        model, 2, (torch.randn(2, 4),), costs="estimated", balance="uniform", ties="sync"
    ).stages
    written = model.get_parameter(name) if "weight" in name else model.get_buffer(name)
    copies = Copies(stages[:1], stages)
    copies.begin()
    copies.check()
    with torch.no_grad():
        written.mul_(0.5)
    with pytest.raises(StepError, match=rf"stage 0 wrote to {name} .* stage 1 on rank 1 has a copy"):
        copies.check()
    copies.begin()
    copies.check()


def test_what_one_rank_alone_has_may_change():
    model = Shared()
    stages = autopipe.split(model, 2, (torch.randn(2, 4),), costs="estimated", balance="uniform").stages
    alone, together = Copies(stages[:1], stages), Copies(stages, stages)
    alone.begin()
    together.begin()
    with torch.no_grad():
        model.layers[0].bias.mul_(0.5)
    alone.check()
    model.scale.mul_(0.5)
    together.check()
