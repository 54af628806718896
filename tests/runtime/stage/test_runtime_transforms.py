"""Layers that write to buffers beside transforms of ``torch.func``, which take no hooks on what is saved."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import autopipe


class Counting(nn.Module):
    """Counts its calls in a buffer, and adds what a transform makes of its layer."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(4, 4), way
        self.register_buffer("n", torch.zeros(()))

    def made(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        if self.way == "jvp":
            return sum(torch.func.jvp(self.made, (x,), (x.cos(),)))
        value, pull = torch.func.vjp(self.made, x)
        return value + pull(value)[0]


class Moving(nn.Module):
    """Moves a buffer that what is derived reads, as a scale that decays."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(0.9)
        value, pull = torch.func.vjp(lambda t: self.linear(t).tanh() * self.scale, x)
        return value + pull(value)[0]


class Net(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), inner, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


def square(out: Tensor, _: object) -> Tensor:
    return out.square().mean()


@pytest.mark.parametrize("n_microbatches", [1, 3])
@pytest.mark.parametrize("way", ["vjp", "jvp"])
def test_layers_that_write_to_buffers_may_derive_by_transforms(way, n_microbatches):
    torch.manual_seed(0)
    model, x = Net(Counting(way)).double(), torch.randn(6, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    pipe = autopipe.split(model, 2, (x,), costs="estimated", n_microbatches=n_microbatches, closed=["inner"])
    loss = square(plain(x), None)
    loss.backward()
    assert float(pipe.runtime(square).step(x).loss) == pytest.approx(loss.item(), rel=1e-12)
    assert model.inner.n == n_microbatches
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_what_a_transform_reads_is_as_its_own_microbatch_left_it():
    """As microbatches one after another: a later one writes before the backward of the first."""
    torch.manual_seed(0)
    model, x = Net(Moving()).double(), torch.randn(6, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    pipe = autopipe.split(model, 2, (x,), costs="estimated", n_microbatches=3, closed=["inner"])
    runtime = pipe.runtime(square, mixed_rows="allow")
    for rows in x.chunk(3):
        (square(plain(rows), None) / 3).backward()
    runtime.step(x)
    torch.testing.assert_close(model.inner.scale, plain.inner.scale)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
