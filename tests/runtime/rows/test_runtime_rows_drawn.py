"""What is drawn once for all rows of a batch is drawn for each microbatch, and told."""

import logging
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopipe
from autopipe.errors import InputError


class Noisy(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.first, self.last, self.draw = nn.Linear(6, 6), nn.Linear(6, 6), draw

    def forward(self, x):
        x = self.first(x)
        return self.last(x * self.draw(x) if self.training else x).square().mean()


def one(x):
    return 1 + torch.rand(())


def of_places(x):
    return F.dropout(torch.ones(1, x.shape[1], 1), 0.5)


def in_place(x):
    return torch.empty(1, 1, 6).bernoulli_(0.5)


def of_rows(x):
    return torch.empty(x.shape[0], 1, 1).bernoulli_(0.5)


def of_each(x):
    return torch.rand_like(x)


def warnings_of(draw, caplog, n_microbatches, training=True):
    torch.manual_seed(0)
    model, x = Noisy(draw), torch.randn(6, 5, 6)
    pipe = autopipe.split(model.train(training), 2, (x,), n_microbatches=n_microbatches, costs="estimated")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "autopipe"):
        runtime = pipe.runtime()
        for _ in range(2):
            runtime.step(x)
    return [r.getMessage() for r in caplog.records if "gradient accumulation" in r.getMessage()]


@pytest.mark.parametrize("draw", [one, of_places, in_place])
def test_what_all_rows_share_is_told_once(draw, caplog):
    (told,) = warnings_of(draw, caplog, 3)
    assert "share what" in told
    assert f"test_runtime_rows_drawn.py:{draw.__code__.co_firstlineno + 1}" in told
    assert not warnings_of(draw, caplog, 1)


@pytest.mark.parametrize("draw", [of_rows, of_each])
def test_what_rows_have_of_their_own_is_not(draw, caplog):
    assert not warnings_of(draw, caplog, 3)


def told_of(model, caplog, training=True):
    x = torch.randn(6, 5, 6)
    pipe = autopipe.split(model.train(training), 2, (x,), n_microbatches=3, costs="estimated")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "autopipe"):
        runtime = pipe.runtime(loss_fn=lambda y, _: y.mean())
        for _ in range(2):
            runtime.evaluate(x, target=x) if not training else runtime.step(x, target=x)
    return [r.getMessage() for r in caplog.records if "share what" in r.getMessage()]


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(5), nn.Linear(6, 6)

    def forward(self, x):
        x = self.norm(self.first(x))
        return self.last(x * one(x) if self.training else x)


def test_it_is_told_beside_what_mixes_rows_and_not_where_nothing_is_drawn(caplog):
    torch.manual_seed(0)
    assert len(told_of(Normed(), caplog)) == 1
    assert not told_of(Normed(), caplog, training=False)


class Whole(nn.Module):
    """Stays whole, and draws."""

    def __init__(self, draw):
        super().__init__()
        self.layer, self.draw = nn.Linear(6, 6), draw

    def forward(self, x):
        return self.layer(x) * self.draw(x) if self.training else self.layer(x)


def of_numpy(x):
    return 1 + np.random.rand()


def of_numpys_rows(x):
    return torch.from_numpy(np.random.rand(len(x), 1, 1)).float()


@pytest.mark.parametrize(("draw", "is_shared"), [
    (one, True), (in_place, True), (of_numpy, True),
    (of_rows, False), (of_each, False), (of_numpys_rows, False),
])  # fmt: skip
def test_what_all_rows_share_is_told_of_code_that_stays_whole(draw, is_shared, caplog):
    torch.manual_seed(0)
    assert len(told_of(nn.Sequential(Whole(draw), nn.Linear(6, 6)), caplog)) == is_shared


class OfItsOwn(nn.Module):
    """Stays whole, and draws from a generator of its own."""

    def __init__(self, rng, draw):
        super().__init__()
        self.layer, self.rng, self.draw = nn.Linear(6, 6), rng, draw

    def forward(self, x):
        return self.layer(x) * self.draw(self.rng) if self.training else self.layer(x)


OWN = {
    "Python's": (lambda: random.Random(0), lambda rng: rng.random()),
    "numpy's": (lambda: np.random.default_rng(0), lambda rng: rng.normal()),
    "numpy's old": (lambda: np.random.RandomState(0), lambda rng: float(rng.rand())),
    "torch's": (torch.Generator, lambda rng: torch.rand((), generator=rng)),
}


@pytest.mark.parametrize("kind", OWN)
def test_what_a_layer_draws_from_a_generator_of_its_own_is_told_as_what_each_call_changes(kind, caplog):
    make, draw = OWN[kind]
    x = torch.randn(6, 5, 6)

    def losses(n_microbatches):
        torch.manual_seed(0)
        model = nn.Sequential(OfItsOwn(make(), draw), nn.Linear(6, 6), OfItsOwn(make(), draw))
        if not n_microbatches:
            return [model(x).square().mean().item() for _ in range(2)]
        pipe = autopipe.split(model, 3, (x,), n_microbatches=n_microbatches, costs="estimated")
        rt = pipe.runtime(loss_fn=lambda y, _: y.square().mean())
        return [rt.step(x, target=x).loss.item() for _ in range(2)]

    assert losses(1) == pytest.approx(losses(0))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "autopipe"):
        losses(3)
    told = [r.getMessage() for r in caplog.records if "at each call" in r.getMessage()]
    assert any("0.rng, 2.rng" in each for each in told)


class OfAnArgument(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.layer, self.draw = nn.Linear(6, 6), draw

    def forward(self, x, rng=None):
        return self.layer(x) * (2 if rng is not None and self.draw(rng) < 0.01 else 1)


@pytest.mark.parametrize("kind", OWN)
def test_a_generator_is_no_argument(kind):
    make, draw = OWN[kind]
    model, x = OfAnArgument(draw), torch.randn(6, 6)
    with pytest.raises(InputError, match="argument rng is a random generator"):
        autopipe.capture(model, (x,), {"rng": make()})
    autopipe.capture(model, (x,))


def test_the_systems_generator_is_one_that_a_layer_may_have():
    model = nn.Sequential(OfItsOwn(random.SystemRandom(), lambda rng: rng.random()), nn.Linear(6, 6))
    assert [op.target for op in autopipe.capture(model, (torch.randn(6, 6),)).ops.compute] == ["0", "1"]


def test_layers_that_share_a_generator_are_one_stage():
    rng = random.Random(0)
    one, other = (OfItsOwn(rng, lambda rng: rng.random()) for _ in range(2))
    found = autopipe.capture(nn.Sequential(nn.Linear(6, 6), one, nn.Tanh(), other), (torch.randn(6, 6),))
    names = {op.target: op.name for op in found.ops.compute}
    assert any({names["1"], names["3"]} <= {*group} for group in found.ops.groups)


OF_THE_FILE = random.Random(0)


class OfTheFile(nn.Module):
    """Stays whole, and draws from a generator of its file."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x).tanh() * OF_THE_FILE.random()


def test_a_stage_that_draws_from_a_generator_of_the_file_does_not_run_again():
    """It would draw other numbers then, of which the loss says nothing."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 6), OfTheFile(), nn.Linear(6, 6), OfTheFile()), torch.randn(6, 6)
    OF_THE_FILE.seed(1)
    model(x).square().mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    options = {"n_microbatches": 1, "costs": "estimated", "recompute": "always"}
    rt = autopipe.split(model, 2, (x,), **options).runtime(loss_fn=lambda y, _: y.square().mean())
    OF_THE_FILE.seed(1)
    rt.step(x, target=x)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name])


class Partly(nn.Module):
    """Draws in a statement of its forward that stays whole."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        x = self.first(x)
        x = x * 2 if self.training and torch.rand(()).item() < 0.5 else x
        return self.last(x)


def test_what_all_rows_share_is_told_of_a_statement_that_stays_whole(caplog):
    torch.manual_seed(0)
    assert len(told_of(Partly(), caplog)) == 1
