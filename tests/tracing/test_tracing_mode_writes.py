"""Layers whose change of mode writes to weights, as merging adapters does, are captured and left as found."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopipe.tracing import capture
from autopipe.tracing.state.state import SMALL


def in_place(weight: Tensor, change: Tensor) -> None:
    weight.data += change


def by_new_data(weight: Tensor, change: Tensor) -> None:
    weight.data = weight.data + change


def by_foreach(weight: Tensor, change: Tensor) -> None:
    torch._foreach_add_([weight.data], [change])


def by_numpy(weight: Tensor, change: Tensor) -> None:
    weight.data.numpy()[:] += change.numpy()


class Merging(nn.Linear):
    """As loralib's: evaluates with the adapter in its weights, which training takes out again."""

    def __init__(self, n: int, write: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__(n, n)
        self.a, self.b = nn.Parameter(torch.randn(2, n) / 8), nn.Parameter(torch.randn(n, 2) / 8)
        self.write, self.is_merged = write, False
        self.weight.requires_grad_(False)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        if self.is_merged is mode:
            self.write(self.weight, (-1 if mode else 1) * (self.b @ self.a).detach())
            self.is_merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.is_merged else super().forward(x) + x @ self.a.T @ self.b.T


class Assigning(nn.Linear):
    """Keeps its weight apart, which training has in the weight's place, evaluation beside an adapter's."""

    def __init__(self, n: int) -> None:
        super().__init__(n, n)
        self.a, self.b = nn.Parameter(torch.randn(2, n) / 8), nn.Parameter(torch.randn(n, 2) / 8)
        self.base = self.weight.data.clone()
        self.weight.requires_grad_(False)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.weight.data = self.base if mode else self.base + (self.b @ self.a).detach()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.a.T @ self.b.T if self.training else super().forward(x)


@pytest.mark.parametrize("found", [False, True])
@pytest.mark.parametrize("n", [8, 300])
def test_weights_that_take_the_memory_of_other_tensors_leave_it_to_these(n: int, found: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Assigning(n), nn.ReLU(), Assigning(n), nn.Linear(n, 2)).train(found)
    bases = [model[i].base for i in (0, 2)]
    before, twin = [base.clone() for base in bases], copy.deepcopy(model)
    captured = capture(model, (torch.randn(2, n),))
    assert all(map(torch.equal, bases, before))
    assert [model[i].weight.data_ptr() == model[i].base.data_ptr() for i in (0, 2)] == [found] * 2
    x = torch.randn(3, n)
    for training in (found, not found, found):
        torch.testing.assert_close(captured.model.train(training)(x), twin.train(training)(x))
        torch.testing.assert_close(captured(x), twin(x))
    assert all(map(torch.equal, bases, before))


@pytest.mark.parametrize("found", [False, True])
@pytest.mark.parametrize("n", [8, 300])
@pytest.mark.parametrize("write", [in_place, by_new_data, by_foreach, by_numpy])
def test_weights_that_a_change_of_mode_writes_to_are_those_of_each_mode(
    write: Callable[[Tensor, Tensor], None], n: int, found: bool
) -> None:
    """Whether they are small enough to be put back without being looked at, or not."""
    assert (n * n > SMALL) is (n > 8)
    torch.manual_seed(0)
    model = nn.Sequential(Merging(n, write), nn.ReLU(), Merging(n, write), nn.Linear(n, 2)).double()
    model.train(True).train(found)
    before = copy.deepcopy(model)
    captured = capture(model, (torch.randn(2, n, dtype=torch.float64),))
    for (name, kept), was in zip(model.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(kept, was), name
    assert model[0].is_merged is before[0].is_merged is not found
    x = torch.randn(3, n, dtype=torch.float64)
    for training in (found, not found, found):
        model.train(training)
        torch.testing.assert_close(captured(x), before.train(training)(x), rtol=1e-12, atol=1e-12)


class Writing(nn.Module):
    """A layer that stays whole, and writes to its weights in each call."""

    def __init__(self, n: int, write: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.weight, self.write = nn.Parameter(torch.ones(n, n), requires_grad=False), write

    def forward(self, x: Tensor) -> Tensor:
        if not bool(x.isnan().any()):
            self.write(self.weight, torch.ones_like(self.weight))
        return x * self.weight.mean()


@pytest.mark.parametrize("write", [in_place, by_new_data, by_foreach, by_numpy])
def test_weights_that_a_layer_run_whole_writes_to_are_put_back(
    write: Callable[[Tensor, Tensor], None],
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Writing(300, write), nn.Linear(8, 8)).double()
    twin, x = copy.deepcopy(model), torch.randn(2, 8, dtype=torch.float64)
    captured = capture(model, (x,))
    assert torch.equal(model[1].weight, twin[1].weight)
    for _ in range(2):
        torch.testing.assert_close(captured(x), twin(x), rtol=1e-12, atol=1e-12)
