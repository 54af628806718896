"""Of layers that do the same one is asked for all about many rows; those that do not are asked each."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.tracing import capture
from autopipe.tracing.rows import data_dependent, mixing
from autopipe.tracing.sizes import rerun

N_LAYERS = 12


class Layer(nn.Module):
    """A layer that stays whole and does something to what its weights give."""

    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(4, 4), does

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        return self.does(self.linear(x))


class Stack(nn.Module):
    """Layers in a row, all but one of which do the same."""

    def __init__(self, does: Any, other: Any, place: int, beside: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(other if i == place else does) for i in range(N_LAYERS))
        self.beside = beside

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, self.beside)
        return x


def captured(model: nn.Module) -> Any:
    torch.manual_seed(0)
    closed = [f"layers.{i}" for i in range(N_LAYERS)]
    return capture(model, (torch.randn(2, 4),), closed=closed).variation.mixing


def among_many(x: Tensor) -> Tensor:
    return x.tanh().roll(1, 0) if len(x) >= 8 else x.tanh()


def centred(x: Tensor) -> Tensor:
    return x.tanh() - x.tanh().mean(0) if len(x) >= 8 else x.tanh()


def shifted_by_mean(x: Tensor) -> Tensor:
    return x.tanh() - x.median(0).values / 64


def by_data(x: Tensor) -> Tensor:
    return x.tanh() if x.abs().max() < 30 else x - x.mean(0)


def far(x: Tensor) -> Tensor:
    return x.tanh() if len(x) <= 100 else x - x.mean(0)


def test_one_layer_runs_for_all_that_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: collections.Counter[str] = collections.Counter()
    run_call = rerun.run_call

    def noting(model: Any, constants: Any, call: Any, args: Any, *told: Any) -> Any:
        seen[str(call.target)] += call.op == "call_module" and len(args[0]) == 8
        return run_call(model, constants, call, args, *told)

    monkeypatch.setattr(rerun, "run_call", noting)
    assert not captured(Stack(torch.tanh, torch.tanh, 0)).always
    assert seen["layers.0"] == 4
    assert {seen[f"layers.{i}"] for i in range(1, N_LAYERS)} == {1}


@pytest.mark.parametrize("place", [0, 5, N_LAYERS - 1])
@pytest.mark.parametrize("does", [torch.tanh, among_many, centred, shifted_by_mean, by_data])
def test_what_one_layer_does_to_rows_is_found_whichever_it_is(does: Any, place: int) -> None:
    found = captured(Stack(torch.tanh, does, place))
    assert bool(found.always) is (does is not torch.tanh)


@pytest.mark.parametrize("place", [0, 5, N_LAYERS - 1])
def test_what_one_layer_does_from_many_rows_on_is_found(place: int) -> None:
    found = captured(Stack(torch.tanh, far, place))
    assert found.always or found.beyond


@pytest.mark.parametrize("does", [among_many, centred, shifted_by_mean, by_data, far])
def test_what_all_layers_do_is_found(does: Any) -> None:
    found = captured(Stack(does, does, 0))
    assert found.always or found.beyond


class Counts:
    """What a layer may write to."""

    n = 0


@pytest.mark.parametrize(
    ("does", "beside", "n_kinds"),
    [
        (torch.tanh, None, 1),
        (torch.tanh, (1, 2.0), 1),
        (torch.tanh, [1], N_LAYERS),
        (torch.tanh, Counts(), N_LAYERS),
        (by_data, None, N_LAYERS),
        (lambda x: x.sort(0).values, None, N_LAYERS),
        (lambda x: x - x.mean(0), None, N_LAYERS),
    ],
)
def test_layers_that_may_leave_something_or_go_by_data_are_none_that_share(
    does: Any, beside: Any, n_kinds: int
) -> None:
    assert n_kinds_seen(Stack(does, does, 0, beside)) == n_kinds


def test_what_others_make_of_values_meanwhile_is_nothing_that_layers_do() -> None:
    def keep(call: Any, value: Tensor) -> None:
        if call.op == "placeholder":
            value.detach().sort()

    assert n_kinds_seen(Stack(torch.tanh, torch.tanh, 0), keep) == 1


def n_kinds_seen(model: nn.Module, keep: Any = None) -> int:
    """How many kinds of layers a run is seen to have; those that share with none are one each."""
    layers = [f"layers.{i}" for i in range(N_LAYERS)]
    form = next(iter(capture(model, (torch.randn(2, 4),), closed=layers).new_forms.made.forms[False]))
    watch = data_dependent.Watch(model, form, 8)
    watch.keep = keep
    run = mixing.rows_of(
        model,
        form,
        {"x": torch.randn(2, 4)},
        next(d for d in capture(model, (torch.randn(2, 4),), closed=layers).ops.dims if d.name == "batch"),
        torch.device("cpu"),
        lambda: None,
        alone=True,
        times=4,
    )
    watch.first(run, "ab")
    shared = watch.alike.sharing()
    kinds = [shared.kind(path) for path in layers]
    n_kinds = len({k for k in kinds if not k.is_hooked}) + sum(k.is_hooked for k in kinds)
    assert watch.alike.is_worth_it is (n_kinds == 1)
    return n_kinds


def dropping(least: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.tanh() if len(x) >= least else x[0].tanh()


@pytest.mark.parametrize("place", [0, 5, N_LAYERS - 1])
@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("does", [torch.tanh, dropping(1)])
def test_what_one_layer_does_to_a_single_row_is_found_whichever_it_is(
    does: Any, least: int, place: int
) -> None:
    found = captured(Stack(does, dropping(least), place))
    assert bool(found.one_row) is (least == 2)


class Placed(nn.Module):
    """A layer whose code drops a single row's axis if it is the fourth, as its number or a buffer says."""

    def __init__(self, place: int, by_size: bool) -> None:
        super().__init__()
        self.linear, self.layer_idx, self.by_size = nn.Linear(4, 4), place, by_size
        self.register_buffer("least", torch.zeros(2 if by_size and place == 3 else 1))

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        made = self.linear(x)
        is_few = len(x) < len(self.least) if self.by_size else len(x) == 1 and self.layer_idx == 3
        return made[0] if is_few else made


@pytest.mark.parametrize("by_size", [False, True])
def test_what_code_of_one_layer_does_to_a_single_row_alone_is_found(by_size: bool) -> None:
    model = Stack(torch.tanh, torch.tanh, 0)
    model.layers = nn.ModuleList(Placed(i, by_size) for i in range(N_LAYERS))
    assert "layers.3" in captured(model).one_row


def test_one_layer_of_torchs_is_given_a_single_row_for_all_of_its_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: collections.Counter[str] = collections.Counter()
    run_call = rerun.run_call

    def noting(model: Any, constants: Any, call: Any, args: Any, *told: Any) -> Any:
        seen[str(call.target)] += call.op == "call_module" and len(args[0]) == 1
        return run_call(model, constants, call, args, *told)

    monkeypatch.setattr(rerun, "run_call", noting)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(N_LAYERS)))
    assert not capture(model, (torch.randn(2, 4),)).variation.mixing.one_row
    assert seen["0"] == 2 + seen["1"]
    assert len({seen[str(i)] for i in range(1, N_LAYERS)}) == 1
