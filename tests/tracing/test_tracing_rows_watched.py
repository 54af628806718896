"""A form whose ops have no limits is asked once about many rows, and others as often as about a few."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.tracing import capture
from autopipe.tracing.rows import mixing


class Leaf(nn.Module):
    """A layer with a plain attribute, so that it is one of a user's."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


class Net(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Leaf(function) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def counted(function: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, collections.Counter[int]]:
    """A capture, and how often rows were asked about in batches of each size."""
    seen: collections.Counter[int] = collections.Counter()
    replay = mixing.replay

    def noting(model: Any, form: Any, given: Any, *told: Any, **how: Any) -> Any:
        seen[len(given["x"])] += 1
        return replay(model, form, given, *told, **how)

    monkeypatch.setattr(mixing, "replay", noting)
    torch.manual_seed(0)
    closed = [f"layers.{i}" for i in range(3)]
    return capture(Net(function), (torch.randn(2, 4),), closed=closed).variation.mixing, seen


def limited(x: Tensor) -> Tensor:
    """What is larger than two rows are, and smaller than eight, is made smaller."""
    return x / x.norm().div(3.0).clamp(min=1)


def by_place(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, x.exp() - 1)


def of_many(x: Tensor) -> Tensor:
    return x - x.mean(0) if len(x) >= 8 else x


@pytest.mark.parametrize(
    "function", [torch.tanh, nn.functional.gelu, nn.functional.silu], ids=lambda f: f.__name__
)
def test_smooth_rows_are_asked_about_in_many_once(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found, seen = counted(function, monkeypatch)
    assert seen[8] == 1
    assert not found.always


def test_rows_with_limits_are_asked_about_in_many_as_in_few(monkeypatch: pytest.MonkeyPatch) -> None:
    found, seen = counted(by_place, monkeypatch)
    assert seen[8] >= 3
    assert not found.always


@pytest.mark.parametrize("function", [limited, of_many])
def test_what_many_rows_alone_do_to_one_another_is_found(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, seen = counted(function, monkeypatch)
    assert seen[8]
    assert found.always


def test_code_that_does_not_run_while_somebody_watches_is_asked_about_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unwatched(x: Tensor) -> Tensor:
        if torch.utils._python_dispatch._get_current_dispatch_mode_stack():
            raise RuntimeError("watched")
        return limited(x)

    assert counted(unwatched, monkeypatch)[0].always
