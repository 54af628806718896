"""A microbatch has two rows or more where one row alone is something else to the model than among others."""

import logging

import pytest
import torch
from splitting import split_by_layers
from torch import nn

import autopipe
from autopipe.errors import StepError


class Two(nn.Module):
    """Two layers, and what drops the axis of a single row between them."""

    def __init__(self, does):
        super().__init__()
        self.a, self.b, self.does = nn.Linear(5, 6), nn.Linear(6, 6), does

    def forward(self, x):
        return self.b(self.does(self.a(x).tanh()))


class Squeezes(nn.Module):
    def forward(self, h):
        return h.unsqueeze(1).squeeze()


def all_axes(h):
    h = h.unsqueeze(1).squeeze()
    return h.sum(1) + h.amax(1)


def first_axis(h):
    h = h.squeeze(0)
    return h.sum(1) + h.amax(1)


def by_shape(h):
    h = h.view([n for n in h.shape if n != 1])
    return h.sum(1)


def fails(h):
    return nn.functional.normalize(h.sum(1, keepdim=True).squeeze(), dim=1)


class Kept(nn.Module):
    """Is kept whole: its own code goes by values."""

    def forward(self, h):
        h = h.squeeze()
        return h.sum(1) * (2.0 if h.shape[-1] == 6 else 1.0)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, h):
        return self.norm(h.sum(1))


def pipe_of(model, x, **options):
    return split_by_layers(model, 2, (x,), **options)


def data(n):
    return torch.randn(n, 4, 5), torch.randn(n, 6)


def assert_exact(model, pipe, batches, loss_fn=nn.functional.mse_loss):
    runtime = pipe.runtime(loss_fn=loss_fn)
    for x, y in batches:
        loss = loss_fn(model(x), y)
        wanted = torch.autograd.grad(loss, [*model.parameters()])
        model.zero_grad()
        assert torch.allclose(runtime.step(x, target=y).loss, loss, atol=1e-6)
        assert all(
            torch.allclose(p.grad, g, atol=1e-6) for p, g in zip(model.parameters(), wanted, strict=True)
        )
        with torch.no_grad():
            assert torch.allclose(runtime.forward(x), model(x), atol=1e-6)


class Asks(nn.Module):
    """Code of a user's that gives a row something else where it is alone, in both modes or in training."""

    def __init__(self, asks, p=0.0, in_training=False):
        super().__init__()
        self.asks, self.drop, self.in_training = asks, nn.Dropout(p), in_training

    def forward(self, h):
        is_alone = self.asks(h) and (self.training or not self.in_training)
        return self.drop(h.sum(1)) * (2 if is_alone else 1)


def has_no_second(h):
    try:
        h[1]
    except IndexError:
        return True
    return False


ASKING = [
    Asks(lambda h: len(h) == 1),
    Asks(lambda h: h.numel() == h[0].numel()),
    Asks(has_no_second),
    Asks(lambda h: len(h) < 2, in_training=True),
    Asks(lambda h: len(h) < 2, p=1e-12, in_training=True),
]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, g):
        return g * 2 if len(g) == 1 else g


class Graded(nn.Module):
    """Code of a user's that gives a row that is alone other gradients, in both modes or in training."""

    def __init__(self, does, in_training=False):
        super().__init__()
        self.does, self.in_training = does, in_training

    def forward(self, h):
        h = h.sum(1)
        return self.does(h) if self.training or not self.in_training else h


def hooked(h):
    h = h.clone()
    if h.requires_grad:
        h.register_hook(lambda g: g * 2 if len(g) == 1 else g)
    return h


def without_gradients(h):
    return h.detach() if len(h) == 1 else h


GRADED = [
    Graded(without_gradients),
    Graded(without_gradients, in_training=True),
    Graded(hooked),
    Graded(Doubled.apply),
]


@pytest.mark.parametrize("does", [all_axes, first_axis, fails, Kept(), *ASKING, *GRADED])
@pytest.mark.filterwarnings("error:Using a target size")
def test_microbatches_of_two_rows_give_what_the_batch_gives(does):
    model = Two(does)
    pipe = pipe_of(
        model, data(4)[0], n_microbatches=4, closed=["does"] if isinstance(does, nn.Module) else ()
    )
    assert pipe.plan.n_microbatches == 2
    assert_exact(model, pipe, [data(4), data(5), data(3), data(8)])


def test_a_form_that_asks_for_other_sizes_than_one_is_right_too():
    model = Two(by_shape)
    assert_exact(model, pipe_of(model, data(4)[0], n_microbatches=4), [data(4), data(5), data(3)])


def test_the_default_number_is_of_microbatches_of_two_rows():
    assert pipe_of(Two(all_axes), data(6)[0]).plan.n_microbatches == 3
    assert pipe_of(Two(torch.sin), data(6)[0]).plan.n_microbatches == 6


def test_a_last_batch_is_cut_into_fewer():
    model = Two(all_axes)
    pipe = pipe_of(model, data(8)[0], n_microbatches=4)
    assert pipe.plan.n_microbatches == 4
    assert_exact(model, pipe, [data(8), data(5), data(2)])


def test_fewer_microbatches_than_asked_for_are_told_with_the_op(caplog):
    with caplog.at_level(logging.WARNING, "autopipe"):
        pipe_of(Two(all_axes), data(4)[0], n_microbatches=4)
    (said,) = [r.getMessage() for r in caplog.records if "single rows" in r.getMessage()]
    assert "squeeze() at " in said
    assert "planned for 2" in said


def test_batch_norm_is_never_given_one_row():
    model = Two(Normed())
    pipe = pipe_of(model, data(4)[0], n_microbatches=4)
    assert "a single row" in pipe.graph.one_row
    runtime = pipe.runtime(loss_fn=nn.functional.mse_loss)
    x, y = data(5)
    assert runtime.step(x, target=y).loss.isfinite()


def test_one_row_that_is_a_batch_is_the_models_own_affair():
    model = Two(lambda h: h.unsqueeze(1).squeeze().mul(2))
    runtime = pipe_of(model, data(4)[0], n_microbatches=4).runtime(loss_fn=lambda o, _: o.mean())
    x, y = data(1)
    assert runtime.forward(x).shape == model(x).shape == (4, 6)
    assert torch.allclose(runtime.step(x, target=y).loss, model(x).mean())


def test_what_gives_a_single_row_something_else_ahead_of_a_tail_is_told():
    model = nn.Sequential(nn.Linear(5, 6), Asks(lambda h: len(h) == 1), nn.Linear(6, 6), Centres())
    pipe = pipe_of(model, data(4)[0], n_microbatches=4, closed=["1"])
    assert pipe.graph.variation.tail.ops
    assert "1 at" in pipe.graph.one_row
    assert "something else than" in pipe.graph.one_row


class Centres(nn.Module):
    def forward(self, h):
        return h - h.mean(0)


class Loses(nn.Module):
    """Drops the axis at its end, behind what compares rows and so has the whole batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        h = self.c(self.b(self.a(x).tanh()).tanh())
        return (h - h.mean(0)).squeeze().exp()


def test_what_follows_on_the_whole_batch_may_drop_the_axis():
    model, x = Loses(), torch.randn(4, 5)
    pipe = pipe_of(model, x, n_microbatches=4)
    assert pipe.graph.variation.tail.ops
    assert pipe.plan.n_microbatches == 4
    assert_exact(model, pipe, [(x, torch.randn(4)), (torch.randn(5, 5), torch.randn(5))])


def test_a_loss_fn_that_fails_on_a_single_row_is_told_what_to_do():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss_fn(output, target):
        return nn.functional.binary_cross_entropy_with_logits(output.squeeze(), target)

    x, y = torch.randn(4, 5), torch.ones(4)
    pipe = pipe_of(model, x, n_microbatches=4)
    assert torch.allclose(pipe.runtime(loss_fn=loss_fn).step(x, target=y).loss, loss_fn(model(x), y))
    runtime = pipe.runtime(loss_fn=loss_fn, loss_on="microbatches")
    with pytest.raises(
        StepError, match=r"single row of the batch's 4; .*squeeze\(-1\), or pass n_microbatches=2"
    ):
        runtime.step(x, target=y)
    assert torch.allclose(runtime.step(x, target=y, n_microbatches=2).loss, loss_fn(model(x), y))


def share_not_explained(y, target):
    return (y - target).square().sum() / (target[:, 0] - target[:, 0].mean()).square().sum()


def test_a_loss_that_is_no_number_of_a_single_row_says_how_many_rows_it_had():
    torch.manual_seed(0)
    x, y = data(3)
    model = Two(lambda h: h.sum(1)).double()
    pipe, plain = (
        pipe_of(model, x.double(), n_microbatches=3),
        share_not_explained(model(x.double()), y.double()),
    )
    assert torch.allclose(pipe.runtime(share_not_explained).step(x.double(), target=y.double()).loss, plain)
    runtime = pipe.runtime(share_not_explained, loss_on="microbatches")
    with pytest.raises(StepError, match=r"of 1 of the batch's 3 rows; .* loss_on='batch'"):
        runtime.step(x.double(), target=y.double())
    assert runtime.step(x.double(), target=y.double(), n_microbatches=1).loss.isfinite()


class Alone(nn.Module):
    """Stays whole, draws noise of any kind, and gives a single row something else."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, h):
        if h.isnan().any():
            return h
        return (h + 0 * self.draw(h)) * (2 if len(h) == 1 else 1)


@pytest.mark.parametrize("draw", [torch.randn_like, lambda h: torch.randint(0, 9, h.shape), nn.Dropout(0.5)])
def test_what_draws_noise_is_asked_of_a_single_row_too(draw):
    found = autopipe.capture(Two(Alone(draw)), (torch.randn(4, 5),))
    assert "a single row something else" in found.variation.mixing.one_row
