"""Mixing that weighs little, or that no example comes to, is found in any precision."""

import pytest
import torch
from rows_models import captured_mixing, decided
from splitting import split_by_layers
from torch import nn
from torch.nn import functional as F

import autopipe
from autopipe.errors import InputError
from autopipe.tracing.sizes.variation import Mixing


class Routed(nn.Module):
    """A layer that says how unevenly all tokens of a batch choose, as experts are balanced."""

    def __init__(self):
        super().__init__()
        self.gate, self.linear = nn.Linear(4, 3), nn.Linear(4, 4)

    def forward(self, x):
        chances = self.gate(x).softmax(-1).flatten(0, 1)
        chosen = F.one_hot(chances.argmax(-1), 3).to(x.dtype)
        return x + self.linear(x), 3 * (chances.mean(0) * chosen.mean(0)).sum()


class Balanced(nn.Module):
    """A small share of its loss says how evenly its layers' tokens choose."""

    def __init__(self, share):
        super().__init__()
        self.layers, self.head, self.share = (
            nn.ModuleList([Routed() for _ in range(3)]),
            nn.Linear(4, 5),
            share,
        )

    def forward(self, x, labels):
        told = 0.0
        for layer in self.layers:
            x, uneven = layer(x)
            told = told + uneven
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + self.share * told


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("share", "is_told"), [(1e-2, True), (1e-3, True), (0.0, False)])
def test_what_mixes_rows_in_a_small_share_of_a_loss_is_found_in_any_precision(share, is_told, dtype):
    torch.manual_seed(0)
    model, x = Balanced(share).to(dtype), torch.randn(4, 6, 4).to(dtype)
    found = captured_mixing(model, x, torch.randint(0, 5, (4, 6)))
    assert bool(found.always) == is_told


class Weighted(nn.Module):
    """Its rows have weights, by all of which it divides, or by their number."""

    def __init__(self, *, is_divided):
        super().__init__()
        self.a, self.b, self.is_divided = nn.Linear(4, 4), nn.Linear(4, 4), is_divided

    def forward(self, x, weights):
        told = self.b(self.a(x).relu()).square().mean(-1) * weights
        return told.sum() / weights.sum() if self.is_divided else told.mean()


@pytest.mark.parametrize("is_divided", [True, False])
def test_weights_that_are_all_one_in_the_example_weigh(is_divided):
    torch.manual_seed(0)
    model, x = Weighted(is_divided=is_divided).double(), torch.randn(8, 4).double()
    pipe = split_by_layers(model, 2, (x[:4], torch.ones(4).double()), n_microbatches=4)
    assert bool(pipe.graph.ops.tail) == is_divided
    weights = torch.rand(8).double()
    loss = pipe.runtime().step(x, weights).loss.detach().as_subclass(torch.Tensor)
    torch.testing.assert_close(loss, model(x, weights).detach(), rtol=1e-12, atol=0)


class Bent(nn.Module):
    """Its loss, or a part of it, is bent at a level."""

    def __init__(self, bend):
        super().__init__()
        self.a, self.b, self.bend = nn.Linear(4, 4), nn.Linear(4, 3), bend

    def forward(self, x, labels):
        told = self.b(self.a(x).relu())
        return self.bend(F.cross_entropy(told, labels), told.square().mean())


BENDS = {
    "flooded": lambda loss, _: (loss - 0.1).abs() + 0.1,
    "free bits": lambda loss, size: loss + size.clamp(min=50),
    "limited": lambda loss, size: torch.minimum(loss, loss.new_tensor(9.0)) + size,
    "limited in place": lambda loss, size: (loss * 1).clamp_(max=9) + size,
    "under a threshold": lambda loss, _: F.threshold(loss, 0.01, 0.01),
    "left out if small": lambda loss, size: loss * (loss > 0.01) + size,
    "the larger one": lambda loss, size: torch.stack([loss, size + 2]).amax(),
    "apart from a level": lambda loss, _: F.smooth_l1_loss(loss, loss.new_tensor(0.1), beta=0.001),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", BENDS)
def test_a_loss_that_is_bent_where_no_example_comes_runs_on_the_whole_batch(kind, dtype):
    torch.manual_seed(0)
    model, x, labels = Bent(BENDS[kind]).to(dtype), torch.randn(8, 4, dtype=dtype), torch.arange(8) % 3
    pipe = split_by_layers(model, 2, (x[:4], labels[:4]), n_microbatches=4)
    assert pipe.graph.ops.tail
    x[::2] *= 30
    loss = pipe.runtime().step(x, labels).loss.detach().as_subclass(torch.Tensor)
    rounding = 1e-12 if dtype is torch.float64 else 1e-6
    torch.testing.assert_close(loss, model(x, labels).detach(), rtol=rounding, atol=0)


class Judging(nn.Module):
    """A layer that stays whole, and computes a loss that is bent at a level."""

    def __init__(self, bend):
        super().__init__()
        self.bend = bend

    def forward(self, told, labels):
        return self.bend(F.cross_entropy(told, labels), told.square().mean())


class BentInside(nn.Module):
    """Leaves its loss to a layer."""

    def __init__(self, bend):
        super().__init__()
        self.a, self.b, self.judge = nn.Linear(4, 4), nn.Linear(4, 3), Judging(bend)

    def forward(self, x, labels):
        return self.judge(self.b(self.a(x).relu()), labels)


@pytest.mark.parametrize("kind", BENDS)
def test_a_loss_that_is_bent_inside_a_layer_runs_on_the_whole_batch(kind):
    torch.manual_seed(0)
    model, x, labels = BentInside(BENDS[kind]).double(), torch.randn(8, 4).double(), torch.arange(8) % 3
    pipe = autopipe.split(model, 2, (x[:4], labels[:4]), costs="estimated", n_microbatches=4)
    assert pipe.graph.ops.tail
    x[::2] *= 30
    loss = pipe.runtime().step(x, labels).loss.detach().as_subclass(torch.Tensor)
    torch.testing.assert_close(loss, model(x, labels).detach(), rtol=1e-12, atol=0)


def shortened(x):
    return x * (30 / x.norm()).clamp(max=1)


class Shortening(nn.Module):
    """A layer that stays whole, and shortens all rows where they are long together."""

    def forward(self, x):
        return shortened(x)


class Long(nn.Module):
    """Shortens its rows late, by a function or a layer."""

    def __init__(self, shorten):
        super().__init__()
        self.a, self.b, self.shorten = nn.Linear(4, 8), nn.Linear(8, 3), shorten

    def forward(self, x, labels):
        return F.cross_entropy(self.b(self.shorten(self.a(x))), labels)


@pytest.mark.parametrize("shorten", [shortened, Shortening()])
def test_rows_shortened_where_all_of_them_are_long_are_a_part_of_the_tail(shorten):
    torch.manual_seed(0)
    model, x, labels = Long(shorten).double(), torch.randn(8, 4).double(), torch.arange(8) % 3
    pipe = autopipe.split(model, 2, (x[:4], labels[:4]), costs="estimated", n_microbatches=4)
    loss = pipe.runtime().step(x * 99, labels).loss.detach().as_subclass(torch.Tensor)
    torch.testing.assert_close(loss, model(x * 99, labels).detach(), rtol=1e-12, atol=0)


def test_layers_that_make_numbers_of_each_row_mix_none():
    def bent_each(x):
        return torch.stack([row * (30 / row.norm()).clamp(max=1) for row in x])

    model, x, runtime = decided(bent_each, 4)
    for factor in (1, 90):
        loss, wanted = runtime.step(x * factor).loss, model(x * factor).square().mean().detach()
        torch.testing.assert_close(loss.as_subclass(torch.Tensor), wanted)


def test_a_bend_is_found_where_rows_weigh_otherwise_by_their_labels():
    labels = torch.tensor([[-100, -100, 1], [0, 1, 2], [0, 0, 1], [2, 0, 1]])
    x = torch.randn(4, 3, 4)
    for bend, mixes in ((BENDS["flooded"], True), (lambda loss, _: 2 * loss, False)):
        model = Bent(lambda loss, size, bend=bend: bend(loss, size))
        model.b = nn.Sequential(nn.Linear(4, 3), nn.Flatten(0, 1))
        found = captured_mixing(OverTokens(model), x, labels)
        assert bool(found.always) is mixes, found


class OverTokens(nn.Module):
    """Gives a loss the labels of all tokens in a row."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, labels):
        return self.inner(x, labels.flatten())


def test_a_bend_that_no_loss_reaches_is_no_mixing():
    model = Bent(lambda loss, size: loss.clamp(min=0) + size.abs())
    assert captured_mixing(model, torch.randn(4, 4), torch.arange(4) % 3) == Mixing()


class Derived(nn.Module):
    """Takes the derivative of a number of all rows by its input; ``bends`` tells what is cut off."""

    def __init__(self, bends):
        super().__init__()
        self.a, self.b, self.bends = nn.Linear(4, 8), nn.Linear(8, 4), bends

    def forward(self, x):
        with torch.enable_grad():
            x = x.requires_grad_() if x.is_leaf else x
            energy = self.b(self.a(x).tanh()).square().sum(1).mean()
            asked = energy.clamp(max=400) if self.bends == "derivative" else energy
            (force,) = torch.autograd.grad(asked, x, create_graph=True)
        loss = energy.clamp(max=400) if self.bends == "loss" else energy
        return loss + (force * len(x)).square().sum(1).mean()


@pytest.mark.parametrize("bends", ["", "loss", "derivative"])
def test_numbers_that_derivatives_are_taken_of_are_put_where_they_bend(bends):
    torch.manual_seed(0)
    model, x = Derived(bends).double(), torch.randn(8, 4, dtype=torch.float64)
    runtime = split_by_layers(model, 2, (x,), n_microbatches=4).runtime()
    if bends:
        with pytest.raises(InputError, match="for two rows that alone give"):
            runtime.step(x)
    else:
        found = runtime.step(x).loss.detach().as_subclass(torch.Tensor)
        torch.testing.assert_close(found, model(x).detach(), rtol=1e-12, atol=0)
