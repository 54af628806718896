"""A layer that uses parameters of another, however it has them, is opened or refused, never cut from them."""

import functools
import types
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import autopipe
from autopipe.errors import CaptureError
from autopipe.tracing import capture

WIDTH = 6
SHARED = {}


class Head(nn.Module):
    """A layer and a product with the weight of another one, which ``way`` keeps."""

    def __init__(self, way, other):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        way(self, other)

    def forward(self, x):
        return self.product(self.layer(x))


def in_a_list(head, other):
    held = [other]
    head.product = lambda x: linear(x, held[0].weight)


def as_a_method(head, other):
    head.product = other.forward


def in_an_object(head, other):
    head.held = types.SimpleNamespace(other=other)
    head.product = lambda x: linear(x, head.held.other.weight)


def by_a_reference(head, other):
    held = weakref.ref(other)
    head.product = lambda x: x @ held().weight.t()


def by_a_keyword(head, other):
    head.product = functools.partial(linear, weight=other.weight)


def in_a_global(head, other):
    SHARED["other"] = other
    head.product = lambda x: linear(x, SHARED["other"].weight)


def in_a_hook(head, other):
    head.product = lambda x: x
    head.register_forward_hook(lambda module, given, made: linear(made, other.weight))


def joined_with_others(head, other):
    head.product = lambda x: linear(x, torch.cat([head.layer.weight[:1], other.weight], 0))


class Tied(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = Head(way, self.first)

    def forward(self, x):
        return self.head(torch.tanh(self.middle(self.first(x))))


WAYS = [in_a_list, as_a_method, in_an_object, by_a_reference, by_a_keyword, in_a_global, joined_with_others]


@pytest.mark.parametrize("way", WAYS)
def test_an_open_head_has_the_weight_it_is_tied_to(way):
    torch.manual_seed(0)
    model = Tied(way)
    found = capture(model, (torch.randn(4, WIDTH),))
    assert sum("first.weight" in op.parameters for op in found.ops.compute) == 2
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(found(x), model(x))


@pytest.mark.parametrize("way", [*WAYS, in_a_hook])
def test_a_head_that_stays_whole_without_it_is_refused(way):
    with pytest.raises(CaptureError, match=r"head uses first\.weight.*register the layer that has it"):
        capture(Tied(way), (torch.randn(4, WIDTH),), closed=["head"])


def registered(head, other):
    head.other = other
    head.product = lambda x: linear(x, head.other.weight)


def test_a_head_in_which_it_is_registered_stays_whole():
    found = capture(Tied(registered), (torch.randn(4, WIDTH),), closed=["head"])
    (head,) = (op for op in found.ops.compute if op.target == "head")
    assert "first.weight" in head.parameters


class Handed(nn.Module):
    def forward(self, x, weight):
        return linear(x, weight)


class Hands(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), Handed()

    def forward(self, x):
        return self.head(self.first(x), self.first.weight)


def test_a_weight_that_is_handed_over_is_an_argument_like_others():
    model = Hands()
    found = capture(model, (torch.randn(4, WIDTH),), closed=["head"])
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(found(x), model(x))


def scaled(x):
    """Reads its input outside of torch, and so stays whole, and uses a layer that it has by a global."""
    n = int(abs(x.detach().numpy()).max())
    return linear(x, SHARED["other"].weight) * (1 + n)


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        SHARED["other"] = self.first

    def forward(self, x):
        return self.middle(scaled(self.middle(x)))


class Powers(torch.autograd.Function):
    """Uses a layer that it has by a global."""

    @staticmethod
    def forward(ctx, x):
        return linear(x, SHARED["other"].weight)

    @staticmethod
    def backward(ctx, grad):
        return grad @ SHARED["other"].weight


class Applies(Scales):
    def forward(self, x):
        return self.middle(Powers.apply(self.middle(x)))


@pytest.mark.parametrize("model", [Scales, Applies])
def test_a_function_that_uses_a_weight_it_is_not_given_is_refused(model):
    with pytest.raises(CaptureError, match=r"uses first\.weight.*hand it over as an argument"):
        capture(model(), (torch.randn(4, WIDTH),))


class Slot:
    """Holds a weight that is set ahead of each call, where nobody looks."""

    __slots__ = ("given",)

    @property
    def weight(self) -> Tensor:
        if self.given is None:
            raise AttributeError("set the weight first")
        return self.given


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slot = Slot()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.slot.weight


class Generated(nn.Module):
    """A network that makes the weight of a layer, or sets one that ``is_fixed``."""

    def __init__(self, *, is_fixed: bool) -> None:
        super().__init__()
        self.hyper, self.layer, self.last = nn.Linear(4, 4), Scaling(), nn.Linear(4, 4)
        self.is_fixed = is_fixed

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        self.layer.slot.given = torch.ones(4) if self.is_fixed else self.hyper(h)
        made = self.layer(x)
        self.layer.slot.given = None
        return self.last(made)


def test_what_a_captured_graph_fails_with_is_told() -> None:
    with pytest.raises(CaptureError, match=r"fails where the model runs \(set the weight first\)"):
        capture(Generated(is_fixed=True), (torch.randn(4, 4), torch.randn(4)))


def test_a_layer_whose_weight_others_make_out_of_sight_is_opened() -> None:
    model = Generated(is_fixed=False)
    found = capture(model, (torch.randn(4, 4), torch.randn(4)))
    x, h = torch.randn(3, 4), torch.randn(4)
    torch.testing.assert_close(found(x, h), model(x, h))


class Pair:
    """Two tensors, in slots."""

    __slots__ = ("one", "other")

    def __init__(self, one: Tensor, other: Tensor) -> None:
        self.one, self.other = one, other


class PairOfWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 2) for _ in range(2))


class OnPairs(nn.Module):
    """A layer on pairs that gives one in the place of the module in which it has its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = PairOfWeights()

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return Pair(found.one, found.other) if isinstance(found, PairOfWeights) else found

    def forward(self, x: Pair) -> Pair:
        one, other = linear(x.one, self.weight.one), linear(x.other, self.weight.other)
        return Pair(torch.tanh(one - other), torch.tanh(one + other))


class ToPair(nn.Module):
    def forward(self, x: Tensor) -> Pair:
        return Pair(x, 2 * x)


class FromPair(nn.Module):
    def forward(self, x: Pair) -> Tensor:
        return x.one + x.other


def test_layers_that_hand_on_what_hides_tensors_are_opened() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(ToPair(), *[OnPairs() for _ in range(3)], FromPair())
    pipe = autopipe.split(model, 2, (torch.randn(4, WIDTH),), costs="estimated", n_microbatches=2)
    assert pipe.verify().gradients == 6
    x = torch.randn(5, WIDTH)
    torch.testing.assert_close(pipe(x), model(x))
    loss = pipe.runtime(lambda out, _: out.square().mean()).step(x).loss
    torch.testing.assert_close(loss, model(x).square().mean().detach(), rtol=1e-5, atol=1e-6)
