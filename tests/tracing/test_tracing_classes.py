"""What a forward puts on classes: counted and put back, or a memo that is the same whenever it is made."""

import copy

import pytest
import torch
from torch import nn

from autopipe.errors import CaptureError, InputError
from autopipe.tracing import capture

X = torch.randn(3, 4)


class Counts(nn.Module):
    """Has what others count on from."""

    total = 0
    seen: list[int] = []  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


class OfTheClassAbove(Counts):
    def forward(self, x):
        type(self).total += 1
        return self.b(self.a(x)) * type(self).total


class OfNoClass(Counts):
    def forward(self, x):
        cls = type(self)
        cls.times = getattr(cls, "times", 0) + 1
        return self.b(self.a(x)) if cls.times < 3 else self.a(x)


class SetByName(Counts):
    total = 0

    def forward(self, x):
        setattr(type(self), "total", self.total + 1)  # noqa: B010
        return self.b(self.a(x)) * self.total


class Listed(Counts):
    def forward(self, x):
        if len(self.seen) < 2:
            type(self).seen = [*self.seen, 1]
        return self.b(self.a(x)) * (1 + len(self.seen))


class BesideATensor(Counts):
    """Goes by it late, and keeps a tensor of as many rows as a call has beside it."""

    noted = (0, torch.zeros(1))

    def forward(self, x):
        count = self.noted[0] + 1
        type(self).noted = count, x.detach() * count
        return self.b(self.a(x)) * (2 if count > 30 else 1)


class OfFirstData(Counts):
    def forward(self, x):
        if not hasattr(type(self), "scale"):
            type(self).scale = float(x.detach().abs().max())
        return self.b(self.a(x)) / type(self).scale


@pytest.mark.parametrize("kind", [OfTheClassAbove, OfNoClass, SetByName, Listed, BesideATensor])
def test_what_counts_on_a_class_is_refused_and_the_class_left_as_it_was(kind):
    held = dict(vars(kind))
    with pytest.raises(CaptureError, match=r"next call|one after another"):
        capture(kind(), (X,))
    assert dict(vars(kind)) == held


@pytest.mark.parametrize("kind", [OfTheClassAbove, OfNoClass, SetByName, Listed, OfFirstData])
def test_layers_that_count_on_their_class_are_told_of_and_are_one_stage(kind):
    held = dict(vars(kind))
    found = capture(nn.Sequential(kind(), nn.Tanh(), nn.Linear(4, 4), kind()), (X,))
    assert dict(vars(kind)) == held
    mixing = found.variation.mixing
    assert mixing.by_call or mixing.carried or mixing.always
    if kind not in (Listed, OfFirstData):  # of which first calls alone change the class
        names = {op.target: op.name for op in found.ops.compute}
        assert any({names["0"], names["3"]} <= {*group} for group in found.ops.groups)


@pytest.mark.parametrize(
    "layers",
    [
        lambda: (OfTheClassAbove(), SetByName()),
        lambda: [nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)) for _ in range(2)],
    ],
)
def test_what_is_changed_on_two_classes_ties_no_layers(layers):
    first, second = layers()
    found = capture(nn.Sequential(first, nn.Tanh(), second), (X,))
    names = {op.target: op.name for op in found.ops.compute}
    assert not any({names["0"], names["2"]} <= {*group} for group in found.ops.groups)


class Memoises(Counts):
    """Has a class method that keeps on the class what it has found."""

    @classmethod
    def width(cls):
        if "_width" not in vars(cls):
            cls._width = (2.0, "wide")
        return cls._width[0]

    def forward(self, x):
        return self.b(self.a(x)) * self.width()


def test_a_memo_on_a_class_is_no_count_and_stays_there():
    model = Memoises()
    expected = model.b(model.a(X)) * 2
    found = capture(model, (X,))
    assert Memoises._width == (2.0, "wide")
    torch.testing.assert_close(copy.deepcopy(found)(X), expected)
    torch.testing.assert_close(found(X), expected)


class GoesByGradMode(Counts):
    """Goes by whether the call before had gradients."""

    def __init__(self):
        super().__init__()
        self.had = True

    def forward(self, x):
        times = 1 if self.had else 2
        self.had = torch.is_grad_enabled()
        return self.b(self.a(x)) * times


def test_what_calls_without_gradients_leave_for_the_next_is_refused_to_them():
    found = capture(GoesByGradMode(), (X,))
    with torch.no_grad(), pytest.raises(InputError, match="whether gradients are enabled"):
        found(X)
