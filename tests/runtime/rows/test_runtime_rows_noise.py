"""Noise drawn in code kept whole: rows meet where what one is given changes another."""

import pytest
import torch
from rows_models import captured_mixing
from splitting import split_by_layers
from torch import nn
from torch.nn import functional as F

from autopipe.errors import InputError
from autopipe.tracing.rows import by_mode, mixing, noise


class Noisy(nn.Module):
    """A layer that stays whole, since it reads what it is given."""

    def __init__(self, does, always):
        super().__init__()
        self.does, self.always = does, always

    def forward(self, x):
        return self.does(x) if (self.always or self.training) and not x.isnan().any() else x


class Dropping(nn.Module):
    """Has a layer that stays whole and draws in training alone, under one form for both modes."""

    def __init__(self, does):
        super().__init__()
        self.a, self.noisy = nn.Linear(6, 6), Noisy(does, False)

    def forward(self, x):
        return self.noisy(self.a(x))


class Amid(nn.Module):
    """Has such a layer amid it, and a loss where labels are given."""

    def __init__(self, does, always):
        super().__init__()
        self.a, self.noisy, self.b = nn.Linear(6, 6), Noisy(does, always), nn.Linear(6, 4)

    def forward(self, x, labels=None):
        y = self.b(self.noisy(self.a(x)).relu())
        return y if labels is None else F.cross_entropy(y, labels)


def dropblock(x):
    mask = torch.empty_like(x).bernoulli_(0.7)
    return x * mask * mask.numel() / mask.sum()


def centred(x):
    noise = torch.randn_like(x)
    return x + noise - noise.mean(0)


def of_one_norm(x):
    noise = torch.rand_like(x)
    return x + noise / noise.norm()


def dropblock_by_dropout(x):
    mask = F.dropout(torch.ones_like(x), 0.3)
    return x * mask * mask.numel() / mask.sum()


def of_each_row(x):
    return x + torch.randn_like(x) * x.detach().std(1, keepdim=True)


def of_whole_rows(x):
    return x * torch.empty(len(x), 1).bernoulli_(0.7) / 0.7


def of_all_rows_alike(x):
    return x * torch.empty(1, x.shape[1]).bernoulli_(0.7) / 0.7


def of_columns(x):
    return x * torch.rand(x.shape[1] * x.shape[0]).view(x.shape[1], x.shape[0]).t()


def of_an_order(x):
    return x[:, torch.randperm(x.shape[1])]


def of_chosen_places(x):
    return x + x.softmax(1).multinomial(1)


MIXED = dropblock, dropblock_by_dropout, centred, of_one_norm
ALONE = of_each_row, of_whole_rows, of_all_rows_alike, of_columns, of_an_order, of_chosen_places, F.dropout


def _batch(is_labelled):
    return (torch.randn(8, 6), torch.arange(8) % 4) if is_labelled else (torch.randn(8, 6),)


@pytest.mark.parametrize("is_labelled", [True, False])
@pytest.mark.parametrize("always", [True, False])
@pytest.mark.parametrize("does", MIXED, ids=lambda f: f.__name__)
def test_noise_of_other_rows_that_changes_a_row_is_found(does, always, is_labelled):
    found = captured_mixing(Amid(does, always), *_batch(is_labelled))
    said = found.always if always else found.training
    assert "test_runtime_rows_noise.py" in said
    # a norm of even noise tells how many rows there are
    by_number = does is of_one_norm and "whose rows hang on how many there are" in said
    assert by_number or said.endswith("other rows are given other noise")
    assert always or not found.always


@pytest.mark.parametrize("is_labelled", [True, False])
@pytest.mark.parametrize("does", ALONE, ids=lambda f: f.__name__)
def test_noise_of_each_row_and_of_all_alike_is_no_mixing(does, is_labelled):
    found = captured_mixing(Amid(does, True), *_batch(is_labelled))
    assert (found.always, found.training) == ("", "")


def dropout(x):
    return F.dropout(x, 0.1)


@pytest.mark.parametrize(("does", "n_asked"), [(F.dropout, 0), (dropout, 0), (of_each_row, 1)])
def test_torch_s_dropout_of_what_is_trained_needs_no_further_runs(monkeypatch, does, n_asked):
    asked = []
    by_noise = mixing.mixed_by_noise
    monkeypatch.setattr(mixing, "mixed_by_noise", lambda *args: asked.append(args) or by_noise(*args))
    captured_mixing(Dropping(does), torch.randn(8, 6))
    assert len(asked) == n_asked


def attended(x):
    y = x.view(len(x), 1, 2, 3)
    return F.scaled_dot_product_attention(y, y, y, None, 0.4, scale=0.3).view(x.shape)


@pytest.mark.parametrize(("does", "n_drawn"), [(dropout, 0), (F.dropout, 0), (attended, 0), (of_each_row, 1)])
def test_dropout_alone_is_left_out_without_looking_at_each_op(monkeypatch, does, n_drawn):
    looked = []
    kind = by_mode.EvenNoise
    monkeypatch.setattr(by_mode, "EvenNoise", lambda device: looked.append(device) or kind(device))
    captured_mixing(Dropping(does), torch.randn(8, 6))
    assert len(looked) == n_drawn


@pytest.mark.parametrize("does", [dropout, attended, F.dropout1d])
def test_dropout_that_leaves_nothing_out_is_none(does):
    x = torch.randn(4, 6, requires_grad=True)
    with noise.NoDropout() as within:
        found = does(x)
    y = x.view(4, 1, 2, 3)
    whole = F.scaled_dot_product_attention(y, y, y, scale=0.3).view(4, 6) if does is attended else x
    torch.testing.assert_close(found, whole)
    assert found is not x
    assert within.is_of_rows
    with noise.NoDropout() as within:
        does(x.detach())
        assert F.dropout(x, 0.5, training=False) is x
        assert F.dropout(x, 0.5, True, True) is x
    assert not within.is_of_rows


def test_a_step_in_microbatches_with_noise_over_the_batch_is_refused():
    pipe = split_by_layers(Amid(dropblock, True), 2, _batch(True), n_microbatches=2)
    with pytest.raises(InputError, match="other rows are given other noise"):
        pipe.runtime().step(*_batch(True))
    pipe.runtime().step(*_batch(True), n_microbatches=1)


def test_code_that_waits_for_a_number_that_is_not_drawn_is_not_waited_for():
    with pytest.raises(ValueError, match="for ever"), noise.EvenNoise(torch.device("cpu")):
        assert not any(torch.rand(()) > 0.9 for _ in range(1 << 15))
