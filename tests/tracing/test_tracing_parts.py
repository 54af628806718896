"""Which of what layers give hangs on rows is asked of one of those that are alike."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.tracing import capture
from autopipe.tracing.rows import varied_data

N_LAYERS = 6


def passed(layer: Layer, x: Tensor, bias: Tensor) -> Tensor:
    return bias


def grown(layer: Layer, x: Tensor, bias: Tensor) -> Tensor:
    return bias + layer.linear.bias


def of_rows(layer: Layer, x: Tensor, bias: Tensor) -> Tensor:
    return bias + x.mean(0)


def by_weights(layer: Layer, x: Tensor, bias: Tensor) -> Tensor:
    return bias if layer.linear.bias.sum() > -100 else bias + x.mean(0)


class Layer(nn.Module):
    """Gives rows, and beside them a bias without any."""

    def __init__(self, does: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(4, 4), does

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, None]:
        return self.linear(x), self.does(self, x, bias), None


class Stack(nn.Module):
    """Layers that hand on a bias, one of which may do something else than the others."""

    def __init__(self, does: Any, other: Any, place: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(other if i == place else does) for i in range(N_LAYERS))
        self.first = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.first * 2
        for layer in self.layers:
            x, bias, _ = layer(x, bias)
        return x + bias


def asked(model: Stack) -> tuple[Any, ...]:
    """What ``varied_data.gathers`` is asked of the model in evaluation."""
    x = torch.randn(2, 4)
    found = capture(model, (x,), closed=[f"layers.{i}" for i in range(N_LAYERS)])
    made: Any = found.new_forms.made  # type: ignore[union-attr]
    form, variation = made.forms[False][0], made.variation
    dim = next(d for d in variation.dims if d.name == "batch")
    return model.eval(), form, {"x": x}, dim, variation.shapes


def gathers(model: Stack) -> bool:
    told = asked(model)
    with torch.no_grad():
        return varied_data.gathers(*told)


@pytest.mark.parametrize(("does", "n_asked"), [(passed, 1), (grown, N_LAYERS), (by_weights, N_LAYERS)])
def test_alike_layers_run_once(does: Any, n_asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: collections.Counter[str] = collections.Counter()
    run_call = varied_data.run_call

    def noting(model: Any, constants: Any, call: Any, *told: Any) -> Any:
        ran[call.target] += call.op == "call_module"
        return run_call(model, constants, call, *told)

    told = asked(Stack(does, does, 0))
    monkeypatch.setattr(varied_data, "run_call", noting)
    with torch.no_grad():
        assert not varied_data.gathers(*told)
    assert len([n for n in ran.values() if n]) == n_asked


@pytest.mark.parametrize("place", [0, 3, N_LAYERS - 1])
@pytest.mark.parametrize("does", [passed, grown])
def test_a_layer_that_makes_something_of_all_rows_is_told(does: Any, place: int) -> None:
    assert gathers(Stack(does, of_rows, place))
    assert not gathers(Stack(does, does, place))


def test_a_layer_whose_weights_send_it_another_way_is_told() -> None:
    model = Stack(by_weights, by_weights, 0)
    with torch.no_grad():
        model.layers[-1].linear.bias.sub_(1000)  # type: ignore[union-attr, operator]
    assert gathers(model)
