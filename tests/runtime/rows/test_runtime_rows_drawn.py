"""What is drawn once for all rows of a batch is drawn for each microbatch, and told."""

import logging
import os
import random
import secrets
import time
import uuid

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from splitting import split_by_layers
from torch import nn

import autopipe
from autopipe.errors import CaptureError, InputError

X = torch.randn(6, 5, 6)


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
    pipe = split_by_layers(model.train(training), 2, (x,), n_microbatches=n_microbatches)
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
    pipe = split_by_layers(model.train(training), 2, (x,), n_microbatches=3)
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


class InEvaluation(nn.Module):
    """Stays whole, and draws in evaluation alone."""

    def __init__(self, draw):
        super().__init__()
        self.layer, self.draw = nn.Linear(6, 6), draw

    def forward(self, x):
        return self.layer(x) if self.training else self.layer(x) * self.draw(x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("draw", "is_shared"), [(one, True), (of_numpy, True), (of_rows, False)])
def test_so_it_is_of_code_that_draws_in_evaluation(draw, is_shared, training, caplog):
    torch.manual_seed(0)
    model = nn.Sequential(InEvaluation(draw), nn.Linear(6, 6))
    assert len(told_of(model, caplog, training)) == (is_shared and not training)


def test_what_is_drawn_in_training_is_not_told_of_in_evaluation(caplog):
    assert not told_of(nn.Sequential(Whole(one), nn.Linear(6, 6)), caplog, training=False)


class Counting(nn.Module):
    """Stays whole, and counts calls in evaluation; may go by them."""

    def __init__(self, does):
        super().__init__()
        self.layer, self.does = nn.Linear(6, 6), does
        self.register_buffer("seen", torch.zeros(()))
        self.n_calls, self.began = 0, time.perf_counter()

    def forward(self, x):
        x = self.layer(x)
        return x if self.training else self.does(self, x)


def count(layer, x):
    layer.n_calls += 1
    return x


def average(layer, x):
    layer.seen.mul_(0.9).add_(x.mean(), alpha=0.1)
    return x


def fade(layer, x):
    layer.n_calls += 1
    return x / layer.n_calls


def alone(layer, x):
    layer.n_calls = 3
    return x * 2


def timed(layer, x):
    layer.at, layer.took = time.time(), time.perf_counter() - layer.began
    return x


IN_EVALUATION = {
    count: "a forward in evaluation changes 0.n_calls at each call",
    average: "a forward in evaluation changes 0.seen at each call",
    fade: "0.n_calls",
    alone: "",
    timed: "",
}


@pytest.mark.parametrize("does", IN_EVALUATION)
def test_what_each_call_changes_in_evaluation_is_told(does, caplog):
    torch.manual_seed(0)
    model = nn.Sequential(Counting(does), nn.Linear(6, 6))
    pipe = split_by_layers(model, 2, (X,), closed=["0"])
    for training in (True, False):
        pipe.model.train(training)
        for n_microbatches in (1, 3):
            caplog.clear()
            with caplog.at_level(logging.WARNING, "autopipe"):
                pipe.runtime(n_microbatches=n_microbatches).forward(X)
            is_told = bool(IN_EVALUATION[does]) and not training and n_microbatches > 1
            assert bool(caplog.text) == is_told
            assert IN_EVALUATION[does] in caplog.text or not is_told


@pytest.mark.parametrize("does", [count, fade])
def test_that_is_told_beside_what_mixes_rows_in_training(does, caplog):
    torch.manual_seed(0)
    model = nn.Sequential(Counting(does), nn.BatchNorm1d(5), nn.Linear(6, 6))
    runtime = split_by_layers(model, 2, (X,), closed=["0"], n_microbatches=3).runtime()
    for told in ("in training: 1", "0.n_calls"):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "autopipe"):
            for _ in range(2):
                runtime.forward(X)
        assert [told in record.getMessage() for record in caplog.records] == [True]
        model.eval()


class InEither(Counting):
    def forward(self, x):
        return count(self, self.layer(x))


def test_what_calls_change_in_either_mode_is_told_once(caplog):
    torch.manual_seed(0)
    model = nn.Sequential(InEither(count), nn.Linear(6, 6))
    runtime = split_by_layers(model, 2, (X,), closed=["0"], n_microbatches=3).runtime()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "autopipe"):
        for training in (True, False, True):
            model.train(training)
            runtime.forward(X)
    (told,) = caplog.records
    assert "0.n_calls" in told.getMessage()


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
        pipe = split_by_layers(model, 3, (x,), n_microbatches=n_microbatches)
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


def of_a_fresh_torch_generator():
    rng = torch.Generator()
    rng.seed()
    return torch.rand((), generator=rng)


ANEW = {
    "the system's": lambda: random.SystemRandom().random(),
    "secrets": lambda: secrets.randbelow(1000) / 1000,
    "bytes": lambda: os.urandom(1)[0] / 255,
    "Python's": lambda: random.Random().random(),
    "numpy's": lambda: np.random.default_rng().random(),
    "numpy's old": lambda: np.random.RandomState().rand(),
    "torch's": of_a_fresh_torch_generator,
}


class Anew(nn.Module):
    """Stays whole, and draws what nobody has twice."""

    def __init__(self, draw):
        super().__init__()
        self.layer, self.draw = nn.Linear(6, 6), draw

    def forward(self, x):
        x = self.layer(x).tanh()
        return x * (1 + float(self.draw())) if x.isfinite().all() else x


@pytest.mark.parametrize("name", ANEW)
def test_a_stage_that_draws_what_nobody_has_twice_does_not_run_again(name):
    """Its gradients would be of other numbers than its loss, of which both are multiples here."""

    def loss_fn(y, _):
        return y.square().mean()

    torch.manual_seed(0)
    model, x = nn.Sequential(Anew(lambda: 0.0), nn.Linear(6, 6, bias=False)), torch.randn(6, 6)
    plain = loss_fn(model(x), x)
    (slope,) = torch.autograd.grad(plain, model[0].layer.weight)
    model[0].draw = ANEW[name]
    options = {"n_microbatches": 1, "costs": "estimated", "recompute": "always"}
    loss = autopipe.split(model, 2, (x,), **options).runtime(loss_fn=loss_fn).step(x, target=x).loss.detach()
    torch.testing.assert_close(
        model[0].layer.weight.grad / loss.as_subclass(torch.Tensor), slope / plain.detach()
    )


BRANCHES = {
    "the system's": ANEW["the system's"],
    "secrets": ANEW["secrets"],
    "bytes": ANEW["bytes"],
    "Python's": ANEW["Python's"],
    "numpy's": ANEW["numpy's"],
    "numpy's old": ANEW["numpy's old"],
    "what a function makes": lambda: made_without_a_seed().random(),
    "an identity": lambda: uuid.uuid4().int % 1000 / 1000,
}


def made_without_a_seed():
    return random.Random()


class Branching(nn.Module):
    """Goes another way now and then."""

    def __init__(self, draw):
        super().__init__()
        self.layer, self.last, self.draw = nn.Linear(6, 6), nn.Linear(6, 6), draw

    def forward(self, x):
        x = self.layer(x)
        return self.last(x * 2 if self.draw() < 1e-3 else x)


@pytest.mark.parametrize("name", BRANCHES)
def test_open_code_that_goes_by_what_nobody_has_twice_is_kept_whole(name):
    model = Branching(BRANCHES[name])
    with pytest.raises(CaptureError, match=r"draws a random number|depends on a random draw"):
        autopipe.capture(model, (torch.randn(6, 6),))
    found = autopipe.capture(nn.Sequential(nn.Linear(6, 6), model), (torch.randn(6, 6),))
    assert "1" in [op.target for op in found.ops.compute]


def test_a_generator_with_a_seed_is_none_of_these():
    for make in (lambda: random.Random(0), lambda: np.random.default_rng(0)):
        found = autopipe.capture(Branching(lambda make=make: make().random()), (torch.randn(6, 6),))
        assert {"layer", "last"} <= {op.target for op in found.ops.compute}


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
