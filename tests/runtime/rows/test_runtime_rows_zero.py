"""Losses that are 0, or no number, on the example are sums or means, and tell what mixes rows."""

import pytest
import torch
import torch.nn.functional as F
from splitting import split_by_layers
from torch import nn

import autopipe

N = 8


class Model(nn.Module):
    def __init__(self, loss, starts_at_zero=False):
        super().__init__()
        self.first, self.last, self.loss = nn.Linear(6, 8), nn.Linear(8, 5), loss
        if starts_at_zero:
            nn.init.zeros_(self.last.weight)
            nn.init.zeros_(self.last.bias)

    def forward(self, x, y):
        return self.loss(self.last(self.first(x).tanh()), y)


def masked(z, y):
    return F.cross_entropy(z, y.clamp(min=0), reduction="none") * (y >= 0)


def margin(z, y):
    return (y[:, None] - z - 50).relu()


ZEROS = {
    "masked sum": (lambda z, y: masked(z, y).sum(), "nothing counts"),
    "chosen sum": (
        lambda z, y: F.cross_entropy(z, y.clamp(min=0), reduction="none")[y >= 0].sum(),
        "nothing counts",
    ),
    "masked mean": (lambda z, y: masked(z, y).mean(), "nothing counts"),
    "labels' sum": (lambda z, y: F.cross_entropy(z, y, reduction="sum", ignore_index=-1), "nothing counts"),
    "labels' own sum": (
        lambda z, y: F.cross_entropy(z, y, reduction="none", ignore_index=-1).sum(),
        "nothing counts",
    ),
    "hinge's sum": (lambda z, y: margin(z, y).sum(), "no margin"),
    "hinge's mean": (lambda z, y: margin(z, y).mean(), "no margin"),
    "head's sum": (lambda z, y: z.square().sum() + z[:, 0].sum(), "zero head"),
    "head's mean": (lambda z, y: z.square().mean() + z[:, 0].mean(), "zero head"),
    "distance's sum": (lambda z, y: F.mse_loss(z, torch.zeros_like(z), reduction="sum"), "zero head"),
}


def batch(kind, like_example):
    draw = torch.Generator().manual_seed(int(like_example))
    x = torch.randn(N, 6, generator=draw, dtype=torch.float64)
    if kind == "no margin":
        return x, torch.randn(N, generator=draw, dtype=torch.float64) + (0 if like_example else 60)
    y = torch.randint(0, 5, (N,), generator=draw)
    return x, torch.full_like(y, -1) if like_example and kind == "nothing counts" else y


@pytest.mark.parametrize("name", ZEROS)
def test_a_loss_of_0_at_the_example_is_weighed_as_what_it_is(name):
    loss, kind = ZEROS[name]
    torch.manual_seed(0)
    model = Model(loss, kind == "zero head").double()
    example, other = batch(kind, like_example=True), batch(kind, like_example=False)
    assert float(model(*example).detach()) == 0
    expected = model(*other)
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    pipe = split_by_layers(model, 2, example, n_microbatches=4)
    found = pipe.runtime().step(*other)
    torch.testing.assert_close(found.loss.as_subclass(torch.Tensor), expected)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_mean_by_weights_that_are_all_0_at_the_example_is_told_as_one():
    class Weighted(Model):
        def forward(self, x, w):
            each = self.last(self.first(x).tanh()).square().mean(1)
            return (each * w).sum() / w.sum().clamp(min=1)

    torch.manual_seed(0)
    x, w = torch.randn(N, 6).double(), torch.tensor([1.0, 1, 1, 1, 1, 1, 1, 0]).double()
    model = Weighted(None).double()
    pipe = split_by_layers(model, 2, (x, torch.zeros_like(w)), n_microbatches=4)
    found = pipe.runtime().step(x, w)
    torch.testing.assert_close(found.loss.as_subclass(torch.Tensor), model(x, w))


@pytest.mark.parametrize("nothing", [float("nan"), float("inf"), 1e308])
def test_an_example_of_no_numbers_tells_what_another_would(nothing):
    x, y = torch.full((N, 6), nothing, dtype=torch.float64), torch.arange(N) % 5
    ways = {
        "mean": lambda z, y: z.square().mean(),
        "sum": lambda z, y: z.square().sum(),
        "mixed": lambda z, y: F.cross_entropy(z - z.square().mean(0), y),
    }
    found = {
        kind: autopipe.capture(Model(loss).double(), (x, y)).variation.mixing for kind, loss in ways.items()
    }
    assert {kind: mixing.sums for kind, mixing in found.items()} == {
        "mean": False,
        "sum": True,
        "mixed": False,
    }
    assert {kind: bool(mixing.always) for kind, mixing in found.items()} == {
        "mean": False,
        "sum": False,
        "mixed": True,
    }
