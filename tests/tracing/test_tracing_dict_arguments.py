"""Dicts that leaves fill and read: what is in them belongs to one run and may cross a cut."""

from collections import UserDict

import pytest
import torch
from torch import nn

import autopipe
from autopipe.tracing import capture


class Shared(dict):
    """A dict of a library's own."""


class Kept(UserDict):
    """One that is no dict, so that wrappers hand it on as it is."""


class Writes(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.layer, self.out = number, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, shared):
        x = self.layer(x).tanh()
        if self.number % 2 == 0:
            shared[self.number] = (x, self.out(x))
        else:
            a, b = shared[self.number - 1]
            x = x + a * b
        return x


class Takes(Writes):
    """As that, and a value is used up by who reads it."""

    def forward(self, x, shared):
        if self.number % 2:
            a, b = shared.pop(self.number - 1)
            return self.layer(x) + a * b + len(shared)
        return super().forward(x, shared)


class Net(nn.Module):
    def __init__(self, kind, layer, is_read=False):
        super().__init__()
        self.kind, self.is_read = kind, is_read
        self.layers = nn.ModuleList([layer(i) for i in range(6)])

    def forward(self, x):
        shared = self.kind()
        for layer in self.layers:
            x = layer(x, shared=shared) if self.is_read else layer(x, shared)
        return x + shared[4][1] if self.is_read else x


@pytest.mark.parametrize("kind", [dict, Shared, Kept])
@pytest.mark.parametrize(("layer", "is_read"), [(Writes, False), (Writes, True), (Takes, False)])
def test_a_dict_that_layers_fill_and_read(kind, layer, is_read):
    torch.manual_seed(0)
    model = Net(kind, layer, is_read)
    x = torch.randn(2, 4)
    found = capture(model, (x,))
    assert sum(op.kind == "module" for op in found.ops.ops) == 6
    pipe = autopipe.split(model, 3, (x,), costs="estimated", n_microbatches=1)
    for other in (torch.randn(2, 4), torch.randn(5, 4)):
        expected = model(other)
        for run in (found, pipe, pipe):
            torch.testing.assert_close(run(other), expected)
            model.zero_grad()
            run(other).sum().backward()
            got = [p.grad for p in model.parameters()]
            model.zero_grad()
            model(other).sum().backward()
            for a, p in zip(got, model.parameters(), strict=True):
                assert (a is None and p.grad is None) or torch.allclose(a, p.grad, atol=1e-6)


class HandsOn(nn.Module):
    """Writes what it makes into the dict that it is given, and returns that dict, alone or in a tuple."""

    def __init__(self, number, is_alone):
        super().__init__()
        self.number, self.is_alone, self.layer, self.out = number, is_alone, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, features):
        h = self.layer(features.get("h", features["x"])).tanh()
        features.update({"h": h, f"out{self.number // 2}": self.out(h)})
        return features if self.is_alone else (h, features)


class Chain(nn.Module):
    def __init__(self, is_alone):
        super().__init__()
        self.layers = nn.ModuleList([HandsOn(i, is_alone) for i in range(4)])

    def forward(self, features):
        first = features
        for layer in self.layers:
            given = layer(features)
            features = given if layer.is_alone else given[1]
        return features["h"] * first["h"], features


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_dict_that_layers_hand_on_is_the_one_that_they_were_given(is_alone):
    torch.manual_seed(0)
    model = Chain(is_alone)
    found = capture(model, ({"x": torch.randn(2, 4)},))
    assert sum(op.kind == "module" for op in found.ops.ops) == 4
    pipe = autopipe.split(model, 2, ({"x": torch.randn(2, 4)},), costs="estimated", n_microbatches=1)
    for rows in (2, 5):
        x = torch.randn(rows, 4)
        expected = model({"x": x})
        for run in (found, pipe):
            given = {"x": x}
            torch.testing.assert_close(run(given), expected)
            torch.testing.assert_close(given, expected[1])
