"""Holding a pipe against its model leaves no trace, and tells what microbatches cannot do."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopipe
from autopipe.errors import ModelError

D = 4


class Count(nn.Module):
    """A layer whose result goes by the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.n_calls = nn.Linear(D, D), 0

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        return self.layer(x) * self.n_calls


class Shuffle(nn.Module):
    """Two layers in an order that Python draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for i in random.sample([0, 1], 2):
            x = self.layers[i](x)
        return x


class Table(nn.Module):
    """Rows of a table, of which training changes few, each brought to a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, D, sparse=True, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x.abs().long().clamp(max=4))


class Cached(nn.Module):
    """Keeps a table for each length in its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.tables = nn.ModuleList(nn.Linear(D, D) for _ in range(2)), {}

    def forward(self, x: Tensor) -> Tensor:
        table = self.tables.setdefault(x.shape[1], torch.arange(x.shape[1]).cos()[:, None])
        return self.layers[1](self.layers[0](x) * table)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(D, D), Count(), Count()),
        lambda: nn.Sequential(nn.Linear(D, D), Shuffle(), nn.Linear(D, D)),
        lambda: nn.Sequential(Table(), nn.Flatten(), nn.Linear(3 * D * D, D)),
        Cached,
    ],
)
def test_a_model_is_as_it_was_after_it_is_verified(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = make()
    pipe = autopipe.split(model, 2, (torch.randn(6, 3, D),), costs="estimated")
    before = {n: t.clone() for n, t in model.state_dict().items()}
    state = random.getstate()
    pipe.verify()
    pipe.verify()
    assert random.getstate() == state
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert [m.n_calls for m in model.modules() if isinstance(m, Count)] in ([], [0, 0])
    assert not getattr(model, "tables", None)


class Picks(nn.Module):
    """Takes rows by where others say."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.last(self.first(x)[rows])


def test_microbatches_that_cannot_be_run_are_told(caplog: pytest.LogCaptureFixture) -> None:
    rows = torch.tensor([5, 4, 3, 2, 1, 0])
    pipe = autopipe.split(Picks(), 2, (torch.randn(6, D), rows), costs="estimated")
    with caplog.at_level(logging.WARNING, "autopipe"):
        assert pipe.verify().max_output_error == 0
    assert "they cannot be run: IndexError" in caplog.text


class Overwrites(nn.Module):
    """Writes over what its own backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        out = self.last(h)
        h += 1
        return out


def test_a_model_that_does_not_train_itself_is_told() -> None:
    pipe = autopipe.split(Overwrites(), 2, (torch.randn(6, D),), costs="estimated")
    with pytest.raises(ModelError, match="Overwrites's own forward or backward fails on these inputs"):
        pipe.verify()


class Numbered(nn.Module):
    """Has its number from an iterator, of which its forward takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = iter(range(9))
        self.number = next(self.numbers)
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x)) + self.number


def test_a_model_that_holds_an_iterator_is_as_it_was_captured() -> None:
    model = Numbered()
    pipe = autopipe.split(model, 2, (torch.randn(4, D),), n_microbatches=2, costs="estimated")
    pipe.verify()
    assert not pipe.graph.assumptions.changed()
    assert next(model.numbers) == 1


def test_hooks_on_gradients_are_called_by_no_comparison() -> None:
    """One may step an optimizer, and what is compared would be of other weights."""
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
    x, called = torch.randn(6, D), list[str]()
    weight = model[0].weight
    weight.register_hook(lambda grad: called.append("on its gradient"))
    weight.register_post_accumulate_grad_hook(lambda p: called.append("after it"))
    pipe = autopipe.split(model, 2, (x,), costs="estimated", n_microbatches=2)
    pipe.verify()
    assert called == []
    model(x).sum().backward()
    assert called == ["on its gradient", "after it"]
