"""Parameters that a model's own code holds within bounds, or writes to otherwise."""

import copy

import pytest
import torch
from runtime_models import grads, worst
from torch import nn

import autopipe
from autopipe.errors import CaptureError

EXACT = 1e-12


class Scaled(nn.Module):
    """A scale that is above its bound at first."""

    def __init__(self, bound):
        super().__init__()
        self.scale, self.bound = nn.Parameter(torch.full((4,), 3.0)), bound
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        self.bound(self)
        return (self.last(self.first(x) * self.scale).tanh() * self.scale).square().mean()


@torch.no_grad()
def clamped(model):
    model.scale.clamp_(0, 2)


def clamped_data(model):
    model.scale.data.clamp_(max=2)


def set_to_clamped(model):
    model.scale.data = torch.clamp(model.scale.data, 0, 2)


@torch.no_grad()
def copied(model):
    model.scale.copy_(model.scale.clamp(0, 2))


@torch.no_grad()
def of_a_layer(model):
    model.last.weight.clamp_(min=0)


BOUNDS = [clamped, clamped_data, set_to_clamped, copied, of_a_layer]


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_parameter_held_within_bounds_trains_as_in_one_process(bound):
    torch.manual_seed(0)
    model = Scaled(bound).double()
    began = copy.deepcopy(model.state_dict())
    plain = copy.deepcopy(model)
    runtime = autopipe.split(model, 2, (torch.randn(2, 4).double(),), costs="estimated").runtime()
    torch.testing.assert_close(model.state_dict(), began, rtol=0, atol=0)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.5, maximize=True) for m in (runtime, plain))
    for _ in range(3):
        x = torch.randn(6, 4).double()
        found, wanted = runtime.step(x, n_microbatches=3), plain(x)
        wanted.backward()
        assert abs(found.loss - wanted) < EXACT
        assert worst(grads(runtime.named_parameters()), grads(plain.named_parameters())) < EXACT
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=EXACT)


@torch.no_grad()
def moved(model):
    model.scale.mul_(0.99).add_(model.last.bias, alpha=0.01)


def set_to_an_average(model):
    model.scale.data = 0.99 * model.scale.data + 0.01 * model.last.bias.data


@pytest.mark.parametrize("write", [moved, set_to_an_average])
def test_a_write_that_each_microbatch_would_make_again_is_refused(write):
    with pytest.raises(CaptureError, match="writes to parameter scale, as each microbatch would again; do"):
        autopipe.capture(Scaled(write), (torch.randn(2, 4),))


class Late(Scaled):
    def forward(self, x):
        loss = self.last(self.first(x) * self.scale).square().mean()
        self.bound(self)
        return loss


def test_a_parameter_read_ahead_of_its_bounds_is_refused():
    with pytest.raises(CaptureError, match=r"clamp_ writes to parameter scale, which .* has read before; do"):
        autopipe.capture(Late(clamped), (torch.randn(2, 4),))
