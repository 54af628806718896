"""Buffers that a model's own code writes at each call: once a microbatch, and read as they were then."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopipe
from autopipe.runtime.weights.stale import absent


class Keeping(nn.Module):
    """Six layers, ahead of whose last five ``keep`` writes to buffers."""

    def __init__(self, keep):
        super().__init__()
        self.first, self.rest = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.keep = keep
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("spread", torch.ones(4))
        self.register_buffer("slow", self.first.weight.detach().clone())

    def forward(self, x):
        h = self.keep(self, self.first(x), x)
        for layer in self.rest:
            h = layer(h).tanh()
        return h


def adds_in_place(self, h, x):
    if self.training:
        self.total.add_(h.detach().sum(0))
    return h


def puts_another(self, h, x):
    if self.training:
        self.total = self.total + h.detach().sum(0)
    return h


def divides(self, h, x):
    if self.training:
        with torch.no_grad():
            self.spread.mul_(0.9).add_(h.std(0), alpha=0.1)
    return h / self.spread


class Divides(nn.Module):
    """The same in a layer, which stays whole where it asks what its data holds."""

    def __init__(self, asks):
        super().__init__()
        self.asks = asks
        self.register_buffer("spread", torch.ones(4))

    def forward(self, h):
        if self.asks and not bool(h.isfinite().all()):
            raise ValueError("not finite")
        return divides(self, h, None)


class KeepingInside(Keeping):
    """Leaves it to a layer."""

    def __init__(self, asks):
        super().__init__(lambda self, h, x: self.inner(h))
        self.inner = Divides(asks)


def follows_weights(self, h, x):
    if self.training:
        with torch.no_grad():
            self.slow.lerp_(self.first.weight, 0.1)
    return h + F.linear(x, self.slow)


def square(y, _):
    return y.square().mean()


def made(make, **options):
    torch.manual_seed(0)
    model = make().double()
    plain, x = copy.deepcopy(model), torch.randn(6, 4, dtype=torch.float64)
    pipe = autopipe.split(model, 2, (x,), costs="estimated", n_microbatches=3, **options)
    return pipe, model, plain, x


def check(model, plain, loss, expected):
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-13)
    for (name, ours), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13, msg=name)


@pytest.mark.parametrize("keep", [adds_in_place, puts_another])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_what_runs_again_in_backward_writes_once(keep, recompute):
    pipe, model, plain, x = made(lambda: Keeping(keep), recompute=recompute)
    runtime = pipe.runtime(loss_fn=square)
    expected = square(plain(x), None)
    expected.backward()
    check(model, plain, runtime.step(x).loss, expected)


def adds_its_derivative(self, h, x):
    (derivative,) = torch.autograd.grad(h.square().sum(), h, create_graph=self.training)
    return h + derivative


def test_what_runs_again_in_backward_may_take_derivatives_in_forward():
    pipe, model, plain, x = made(lambda: Keeping(adds_its_derivative), recompute="always")
    expected = square(plain(x), None)
    expected.backward()
    check(model, plain, pipe.runtime(loss_fn=square).step(x).loss, expected)


@pytest.mark.parametrize(
    "make", [lambda: Keeping(divides), lambda: KeepingInside(False), lambda: KeepingInside(True)]
)
def test_a_backward_finds_a_buffer_as_its_microbatch_read_it(make):
    pipe, model, plain, x = made(make)
    runtime = pipe.runtime(loss_fn=square, mixed_rows="allow")
    losses = []
    for rows in x.split(2):
        losses.append(square(plain(rows), None))
        (losses[-1] / 3).backward()
    check(model, plain, runtime.step(x).loss, sum(losses) / 3)


def test_an_average_of_weights_that_begins_as_these_is_no_mean_of_microbatches():
    pipe, model, plain, x = made(lambda: Keeping(follows_weights))
    runtime = pipe.runtime(loss_fn=square, mixed_rows="allow")
    optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (model, plain)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = square(plain(x), None)
        expected.backward()
        loss = runtime.step(x).loss
        for optimizer in optimizers:
            optimizer.step()
    mixing = pipe.graph.variation.mixing
    assert mixing.carried or "slow" in mixing.by_call
    if pipe.graph.ops.tail:
        check(model, plain, loss, expected)


def test_a_buffer_that_own_code_writes_on_another_rank_is_told_as_stale():
    pipe, _, _, _ = made(lambda: Keeping(adds_in_place))
    homes = absent(pipe.graph, pipe.stages[1:], pipe.stages)
    assert "total" in {home.name for home in homes}


class Leaves(nn.Module):
    """Leaves something for its next call each time that it runs, other than by writing to a buffer itself."""

    def __init__(self, does):
        super().__init__()
        self.does, self.count, self.held = does, 1.0, torch.ones(6, dtype=torch.float64)
        self.register_buffer("slow", torch.ones(6, dtype=torch.float64))
        self.view, self.array = self.slow[:3], self.slow.numpy()
        self.factors = np.ones(6)

    def forward(self, h):
        out = h * self.slow.clone() * self.held.clone() * self.count * float(self.factors[0])
        self.does(self)
        return out


def counts(self):
    self.count *= 1.25


def into_data(self):
    self.slow.data.mul_(1.25)


def into_an_array(self):
    self.slow.numpy()[:] *= 1.25


def into_data_of_an_attribute(self):
    self.held.data.mul_(1.25)


def into_an_attribute(self):
    self.held *= 1.25


def into_an_array_of_its_own(self):
    self.factors *= 1.25


def into_a_view(self):
    self.view.mul_(1.25)


def into_an_array_kept(self):
    self.array *= 1.25


DOES = (
    counts,
    into_data,
    into_an_array,
    into_data_of_an_attribute,
    into_an_attribute,
    into_an_array_of_its_own,
    into_a_view,
    into_an_array_kept,
)


@pytest.mark.parametrize("does", DOES)
@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "open"])
def test_what_a_layer_leaves_unsaid_it_leaves_once_where_stages_run_again(does, is_whole):
    def make():
        return nn.Sequential(nn.Linear(4, 6), Leaves(does), nn.Linear(6, 6), nn.Linear(6, 6))

    pipe, model, plain, x = made(make, recompute="always", closed=["1"] if is_whole else ())
    plain[1].view, plain[1].array = plain[1].slow[:3], plain[1].slow.numpy()  # of its own copy
    runtime = pipe.runtime(loss_fn=square)
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        expected = square(plain(x), None)
        expected.backward()
        check(model, plain, runtime.step(x, n_microbatches=1).loss, expected)
        assert model[1].count == plain[1].count
