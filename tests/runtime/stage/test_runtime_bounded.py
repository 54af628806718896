"""Parameters that a model's own code holds within bounds, or writes to otherwise."""

import copy
import itertools

import pytest
import torch
from runtime_models import grads, worst
from splitting import split_by_layers
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


def trained_alike(model, plain, runtime, n_steps=3, *, n_inputs=2, maximize=False):
    """Whether steps in microbatches leave all parameters as the plain loop does."""
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.5, maximize=maximize) for m in (runtime, plain))
    for _ in range(n_steps):
        given = [torch.randn(6, 4).double() for _ in range(n_inputs)]
        found, wanted = runtime.step(*given, n_microbatches=3), plain(*given)
        wanted.backward()
        assert abs(found.loss - wanted) < EXACT
        assert worst(grads(runtime.named_parameters()), grads(plain.named_parameters())) < EXACT
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=EXACT)


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_parameter_held_within_bounds_trains_as_in_one_process(bound):
    torch.manual_seed(0)
    model = Scaled(bound).double()
    began = copy.deepcopy(model.state_dict())
    plain = copy.deepcopy(model)
    runtime = split_by_layers(model, 2, (torch.randn(2, 4).double(),)).runtime()
    torch.testing.assert_close(model.state_dict(), began, rtol=0, atol=0)
    trained_alike(model, plain, runtime, n_inputs=1, maximize=True)


@torch.no_grad()
def moved(model):
    model.scale.mul_(0.99).add_(model.last.bias, alpha=0.01)


@torch.no_grad()
def moved_by_an_operator(model):
    model.scale *= 0.99


def set_to_an_average(model):
    model.scale.data = 0.99 * model.scale.data + 0.01 * model.last.bias.data


@pytest.mark.parametrize("write", [moved, moved_by_an_operator, set_to_an_average])
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


def layers(*widths):
    each = (nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths))
    return nn.Sequential(*each)


class Momentum(nn.Module):
    """Rows told from what a slowly moving copy of the encoder makes of them, as in MoCo, BYOL and ALBEF."""

    def __init__(self, move, width=6):
        super().__init__()
        self.encoder, self.momentum, self.move = layers(4, width, width), layers(4, width, width), move
        self.predictor = nn.Linear(width, width)
        for q, k in zip(self.encoder.parameters(), self.momentum.parameters(), strict=True):
            k.data.copy_(q.data)
            k.requires_grad = False

    def forward(self, x, y):
        q = self.predictor(self.encoder(x))
        with torch.no_grad():
            for a, b in zip(self.encoder.parameters(), self.momentum.parameters(), strict=True):
                self.move(a, b)
            k = self.momentum(y)
        return (q - k).square().mean()


def set_anew(q, k):
    k.data = k.data * 0.9 + q.data * 0.1


def in_place(q, k):
    k.mul_(0.9).add_(q, alpha=0.1)


def in_data(q, k):
    k.data.lerp_(q.data, 0.1)


def by_operators(q, k):
    k *= 0.9
    k += 0.1 * q


def copied_there(q, k):
    k.copy_(0.9 * k + 0.1 * q)


MOVES = [set_anew, in_place, in_data, by_operators, copied_there]


@pytest.mark.parametrize("move", MOVES)
def test_a_momentum_encoder_moves_once_a_step(move):
    torch.manual_seed(0)
    model = Momentum(move).double()
    plain, began = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    pipe = split_by_layers(model, 2, (torch.randn(2, 4).double(),) * 2)
    torch.testing.assert_close(model.state_dict(), began, rtol=0, atol=0)
    trained_alike(model, plain, pipe.runtime())
    before, moved_on = copy.deepcopy(model.state_dict()), copy.deepcopy(plain)
    assert pipe.verify(torch.randn(2, 4).double(), torch.randn(2, 4).double()).loss
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    x, y = torch.randn(6, 4).double(), torch.randn(6, 4).double()
    assert abs(pipe(x, y) - moved_on(x, y)) < EXACT
    torch.testing.assert_close(model.state_dict(), moved_on.state_dict(), rtol=0, atol=EXACT)


def test_a_large_momentum_encoder_is_as_it_was_after_capture_and_verify():
    model = Momentum(set_anew, width=300)
    began = copy.deepcopy(model.state_dict())
    pipe = split_by_layers(model, 2, (torch.randn(2, 4),) * 2)
    for each in (pipe, copy.deepcopy(pipe)):
        each.verify()
        torch.testing.assert_close(each.model.state_dict(), began, rtol=0, atol=0)


class Ahead(Momentum):
    """What moves comes before most of the parameters."""

    def __init__(self, move):
        super().__init__(move)
        self.body = layers(6, 20, 20, 6)

    def forward(self, x, y):
        with torch.no_grad():
            for a, b in zip(self.encoder.parameters(), self.momentum.parameters(), strict=True):
                self.move(a, b)
        return self.body(self.momentum(y) + self.encoder(x)).square().mean()


def test_a_parameter_moved_ahead_of_most_others_is_told_of(caplog):
    given = torch.randn(4, 4), torch.randn(4, 4)
    model = Ahead(set_anew)
    runtime = split_by_layers(model, 2, given).runtime()
    plain = copy.deepcopy(model)
    assert abs(runtime.step(*given, n_microbatches=1).loss - plain(*given)) < 1e-6
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    caplog.clear()
    runtime.step(*given, n_microbatches=2)
    assert "a forward in training changes momentum.0.0.bias, momentum.0.0.weight" in caplog.text
