"""What blocks hand to one another beside arguments, as skips in a list, crosses cuts as any tensor does."""

import collections
import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import autopipe

WIDTH = 8


class Stack(list):
    put, take = list.append, list.pop


class Queue(collections.deque):
    put, take = collections.deque.append, collections.deque.pop


class ByNumber(dict):
    def put(self, x):
        self[len(self)] = x

    def take(self):
        return self.pop(len(self) - 1)


class Kept:
    """Holds what was put there last, and lets nothing go."""

    def __init__(self):
        self.x = None

    def put(self, x):
        self.x = x

    def take(self):
        return self.x


class OnClass:
    """Holds it for all of its class."""

    x = None

    def put(self, x):
        OnClass.x = x

    def take(self):
        return OnClass.x


class InTuple:
    """Holds it among other things for all of its class."""

    held = (None, 0)

    def put(self, x):
        InTuple.held = x, 1

    def take(self):
        return InTuple.held[0]


class InClosure:
    """Holds it by a name of functions."""

    def __init__(self):
        held = None

        def put(x):
            nonlocal held
            held = x

        self.put, self.take = put, lambda: held


class Down(nn.Module):
    """Puts aside what it makes inside, or what it gives."""

    def __init__(self, skips, *, gives, frozen):
        super().__init__()
        self.linear, self.skips, self.gives = nn.Linear(WIDTH, WIDTH), skips, gives
        self.linear.requires_grad_(not frozen)

    def forward(self, x):
        x = self.linear(x)
        if self.gives:
            self.skips.put(x)
            return x
        self.skips.put(x.tanh())
        return x.relu()


class Up(nn.Module):
    def __init__(self, skips):
        super().__init__()
        self.linear, self.skips = nn.Linear(2 * WIDTH, WIDTH), skips

    def forward(self, x):
        return self.linear(torch.cat([x, self.skips.take()], -1)).tanh()


class UNet(nn.Module):
    def __init__(self, kind, n, *, gives=False, frozen=False):
        super().__init__()
        self.skips = kind()
        self.down = nn.Sequential(*[Down(self.skips, gives=gives, frozen=frozen) for _ in range(n)])
        self.up = nn.Sequential(*[Up(self.skips) for _ in range(n)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(self.up(self.down(x)))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("gives", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", [Stack, Queue, ByNumber])
def test_skips_in_containers_cross_cuts(kind, n, gives, frozen):
    check_steps(UNet, kind, n, gives=gives, frozen=frozen)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", [Kept, OnClass, InTuple, InClosure])
def test_a_value_in_a_place_for_one_crosses_cuts(monkeypatch, kind, n):
    monkeypatch.setattr(OnClass, "x", None)
    monkeypatch.setattr(InTuple, "held", (None, 0))
    check_steps(UNet, kind, n)


def check_steps(make, *args, **kwargs):
    torch.manual_seed(0)
    model = make(*args, **kwargs)
    alone = copy.deepcopy(model)
    pipe = autopipe.split(model, 2, (torch.randn(4, WIDTH),), n_microbatches=2)
    assert pipe.verify()
    rt = pipe.runtime(loss_fn=mse_loss)
    for n_rows in (4, 5):
        x, target = torch.randn(n_rows, WIDTH), torch.randn(n_rows, 1)
        loss = mse_loss(alone(x), target)
        loss.backward()
        torch.testing.assert_close(rt.step(x, target=target).loss, loss.detach())
    expected = {n: p.grad for n, p in alone.named_parameters()}
    for name, p in rt.named_parameters():
        torch.testing.assert_close(p.grad, expected[name])
    if hasattr(model.skips, "__len__"):
        assert not len(model.skips)


@pytest.mark.parametrize("n", [1, 3])
def test_on_the_meta_device_blocks_that_are_alike_each_put_something_aside(n):
    with torch.device("meta"):
        model = UNet(Stack, n)
    found = autopipe.capture(model, (torch.empty(4, WIDTH, device="meta"),))
    assert sum(op.target == "torch.cat" for op in found.ops.compute) == n
    assert not found.left


class Remembers(nn.Module):
    """Goes by what its own call before has made, which is nobody else's."""

    def __init__(self):
        super().__init__()
        self.linear, self.inner, self.state = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh()), None

    def forward(self, x):
        state = self.inner(self.linear(x) if self.state is None else self.linear(x) + self.state)
        self.state = state
        return state


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Remembers() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            layer.state = None
        for _ in range(3):
            for layer in self.layers:
                x = layer(x)
        return x


def test_a_layer_that_goes_by_its_own_calls_stays_whole():
    found = autopipe.capture(Recurrent(), (torch.randn(4, WIDTH),))
    called = {op.target for op in found.ops.compute if op.kind == "module"}
    assert called == {f"layers.{i}" for i in range(4)}
