"""Buffers of helpers that nothing calls as layers: what a forward adds there, collects and carries on."""

from __future__ import annotations

import copy

import torch
from crossed import crossed
from torch import Tensor, nn

import autopipe


class Collector(nn.Module):
    """Adds a term for each layer, and is emptied where they are collected."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("term", torch.zeros(1))

    def add(self, x: Tensor) -> None:
        if self.training:
            self.term = self.term + x.square().mean()

    def collect(self) -> Tensor:
        found = 0.5 * self.term
        self.term.detach_().zero_()
        return found.sum()


class Average(Collector):
    """Keeps an average of all that it was given, from one call to the next."""

    def add(self, x: Tensor) -> None:
        self.term = 0.5 * self.term + x.detach().square().mean()

    def collect(self) -> Tensor:
        return self.term.sum()


class Net(nn.Module):
    def __init__(self, collector: Collector) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.collector = collector

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            self.collector.add(x)
        return x.square().mean() * (1 + self.collector.collect())


class Summed(Net):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            self.collector.add(x)
        return x.square().mean() + self.collector.collect()


def assert_steps_are_those_of(net: nn.Module, n_stages: int, n_microbatches: int) -> None:
    """Two steps with a call of the model itself between give what a model in one piece gives and holds."""
    torch.manual_seed(0)
    plain = copy.deepcopy(net)
    example = torch.randn(4, 4, dtype=torch.float64)
    pipe = autopipe.split(net, n_stages, (example,), costs="estimated", n_microbatches=n_microbatches)
    runtime = pipe.runtime()
    for step in range(3):
        x = torch.randn(4, 4, dtype=torch.float64)
        if step == 1:
            torch.testing.assert_close(net(x), plain(x), rtol=0, atol=0)
            continue
        net.zero_grad()
        wanted = plain(x)
        gradients = torch.autograd.grad(wanted, [*plain.parameters()])
        torch.testing.assert_close(runtime.step(x).loss, wanted.detach(), rtol=1e-12, atol=1e-12)
        for p, gradient in zip(net.parameters(), gradients, strict=True):
            torch.testing.assert_close(p.grad, gradient, rtol=1e-12, atol=1e-12)
        pairs = zip(net.buffers(), plain.buffers(), strict=True)
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in pairs)


@crossed(
    net=[Summed(Collector()), Net(Collector()), Net(Average())], n_stages=[2, 3], n_microbatches=[1, 2, 4]
)
def test_what_is_collected_is_what_the_model_itself_collects(
    net: Net, n_stages: int, n_microbatches: int
) -> None:
    assert_steps_are_those_of(copy.deepcopy(net).double(), n_stages, n_microbatches)
