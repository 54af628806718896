"""Attributes that a forward leaves behind by the sizes of its inputs, where the model runs between calls."""

import copy

import pytest
import torch
from torch import nn

import autopipe
from autopipe.errors import InputError
from autopipe.tracing import capture


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def through(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Masked(Base):
    """Makes its mask where another length comes."""

    mask = None

    def forward(self, x):
        if self.mask is None or self.mask.shape[0] != x.shape[1]:
            n = x.shape[1]
            self.mask = torch.ones(n, n).tril()
        return self.through(self.mask @ x)


class Anchored(Base):
    """Makes two tables of all sizes of what a layer gives, at the end."""

    shape, anchors, strides = None, torch.empty(0), torch.empty(0)

    def forward(self, x):
        x = self.through(x)
        if self.shape != x.shape:
            self.anchors = torch.arange(x.shape[1], dtype=x.dtype)[:, None] + 0.5
            self.strides = torch.full((x.shape[1], 1), 2.0)
            self.shape = x.shape
        return (x + self.anchors) * self.strides


@pytest.mark.parametrize("kind", [Masked, Anchored])
@pytest.mark.parametrize("training", [False, True])
def test_the_model_may_run_at_other_sizes_between_calls(kind, training):
    model = kind().train(training)
    pipe = autopipe.split(model, 2, (torch.randn(2, 6, 4),), costs="estimated")
    model.train(training)
    for shape in ((2, 6, 4), (3, 6, 4), (2, 9, 4), (2, 9, 4), (3, 6, 4), (1, 5, 4), (2, 6, 4)):
        x = torch.randn(shape)
        with torch.no_grad():
            expected = model(x)
        torch.testing.assert_close(pipe(x), expected, rtol=0, atol=0)


def test_many_sizes_in_turn_are_no_change_without_end():
    model = Masked().eval()
    found = capture(model, (torch.randn(2, 6, 4),))
    for n in (*range(5, 20), 6):
        x = torch.randn(2, n, 4)
        torch.testing.assert_close(found(x), model(x))
        torch.testing.assert_close(found(x), model(x))


class Remembering(Base):
    """Leaves its last data where the next call of the same length finds them."""

    last = None

    def forward(self, x):
        x = self.through(x)
        if self.last is not None and self.last.shape == x.shape and bool(x.sum() > 0):
            x = x + self.last
        self.last = x.detach()
        return x


def outcome(found, x):
    """What the capture gives; None where it refuses for what has changed."""
    try:
        return found(x)
    except InputError as error:
        if "changed after the capture" not in str(error):
            raise
        return None


def test_what_follows_from_data_is_refused_or_right():
    model = Remembering().eval()
    found = capture(model, (torch.randn(2, 6, 4),))
    for shape in ((2, 6, 4), (2, 9, 4), (2, 9, 4), (2, 6, 4)):
        for sign in (1, -1):
            x = sign * torch.rand(shape)
            model(x)
            held = dict(vars(model))
            expected = model(x)
            vars(model).clear()
            vars(model).update(held)
            got = outcome(found, x)
            torch.testing.assert_close(expected if got is None else got, expected)


def test_a_table_that_is_exchanged_by_hand_is_not_overlooked():
    model = Masked().eval()
    x = torch.randn(2, 6, 4)
    found = capture(model, (x,))
    model(x)
    found(x)
    model.mask = torch.ones(6, 6)
    torch.testing.assert_close(found(x), model(x))


class Grown(Base):
    """Makes its table longer where a longer text comes."""

    table = torch.empty(0)

    def forward(self, x):
        if len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / 10
        return self.through(x + self.table[: x.shape[1]])


@pytest.mark.parametrize("kind", [Masked, Anchored, Grown])
@pytest.mark.parametrize("training", [False, True])
def test_a_model_that_has_run_before_is_captured_for_other_sizes_too(kind, training):
    torch.manual_seed(0)
    model = kind().train(training)
    model(torch.randn(2, 6, 4))
    before = dict(vars(model))
    pipe = autopipe.split(model, 2, (torch.randn(2, 6, 4),), costs="estimated")
    assert all(vars(model)[name] is value for name, value in before.items())
    for shape in ((2, 6, 4), (3, 9, 4), (2, 6, 4), (1, 5, 4)):
        x = torch.randn(shape)
        torch.testing.assert_close(pipe(x), copy.deepcopy(model)(x), rtol=0, atol=0)


def test_a_table_of_data_is_none_of_sizes():
    """What a run leaves goes by its data: from there the model gives something else, and is refused there."""
    model = Remembering().eval()
    model(torch.rand(2, 6, 4))
    found = capture(model, (torch.rand(2, 6, 4),))
    for shape in ((2, 6, 4), (2, 9, 4)):
        x = torch.rand(shape)
        before = dict(vars(model))
        expected = model(x)
        vars(model).update(before)
        if (got := outcome(found, x)) is not None:
            torch.testing.assert_close(got, expected)
