"""Lists of a layer kept whole that are as long as the batch: read by places alone, they suit every batch."""

from __future__ import annotations

import contextlib

import pytest
import torch
from splitting import split_by_layers
from torch import Tensor, nn

import autopipe
from autopipe.errors import InputError


class Embed(nn.Module):
    """Gives beside its rows their sizes, once for each row, and a dict with a key for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, list[tuple[int, int]], dict[str, int]]:
        n, length, width = (int(size) for size in x.shape)
        return self.layer(x), [(length, width)] * n, {f"row{i}": length for i in range(n)}


class Net(nn.Module):
    """Subclasses read what ``embed`` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embed()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def end(self, x: Tensor, factor: float) -> Tensor:
        return (self.layers(x) * factor).square().mean((1, 2))


class First(Net):
    def forward(self, x: Tensor) -> Tensor:
        x, sizes, _ = self.embed(x)
        length, width = sizes[0]
        return self.end(x.reshape(-1, length, width), length / width)


class ByName(Net):
    def forward(self, x: Tensor) -> Tensor:
        given = self.embed(x)
        lengths = given[2]
        return self.end(given[0], lengths["row0"] / given[1][0][1])


class Counted(Net):
    def forward(self, x: Tensor) -> Tensor:
        x, sizes, _ = self.embed(x)
        return self.end(x, len(sizes) * sizes[0][0])


class Last(Net):
    def forward(self, x: Tensor) -> Tensor:
        x, sizes, _ = self.embed(x)
        return self.end(x, sizes[-1][0])


class GoneThrough(Net):
    def forward(self, x: Tensor) -> Tensor:
        x, sizes, _ = self.embed(x)
        return self.end(x, sum(length for length, _ in sizes))


class HandedOn(Net):
    def forward(self, x: Tensor) -> Tensor:
        x, sizes, _ = self.embed(x)
        again = sizes
        return self.end(x, again[0][0] + max(again)[0])


def split(net: Net, n_stages: int, n_microbatches: int) -> autopipe.Pipe:
    x = torch.randn(4, 3, 4, dtype=torch.float64)
    return split_by_layers(net, n_stages, (x,), closed=["embed"], n_microbatches=n_microbatches)


@pytest.mark.parametrize("make", [First, ByName])
@pytest.mark.parametrize("n_stages", [2, 3])
@pytest.mark.parametrize("n_microbatches", [1, 2, 4])
def test_what_is_read_by_place_suits_every_batch(make: type[Net], n_stages: int, n_microbatches: int) -> None:
    torch.manual_seed(0)
    net = make().double()
    runtime = split(net, n_stages, n_microbatches).runtime(loss_fn=lambda y, _: y.mean())
    for rows, length in ((4, 3), (8, 3), (6, 5)):
        x = torch.randn(rows, length, 4, dtype=torch.float64)
        wanted = torch.autograd.grad(net(x).mean(), [*net.parameters()])
        net.zero_grad()
        runtime.step(x)
        for p, gradient in zip(net.parameters(), wanted, strict=True):
            torch.testing.assert_close(p.grad, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [Counted, Last, GoneThrough, HandedOn])
def test_a_list_that_is_read_otherwise_is_right_or_told(make: type[Net]) -> None:
    torch.manual_seed(0)
    net, x = make().double(), torch.randn(8, 3, 4, dtype=torch.float64)
    runtime = split(net, 2, 1).runtime(loss_fn=lambda y, _: y.mean())
    with contextlib.suppress(InputError):
        torch.testing.assert_close(runtime.step(x).loss, net(x).mean().detach(), rtol=1e-12, atol=0)
