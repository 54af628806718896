"""That modules run without data gives what torch gives there, also where only shapes are made."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopipe.tracing.calls.call import Call
from autopipe.tracing.calls.kinds import kind_of
from autopipe.tracing.calls.regions import Region
from autopipe.tracing.sizes import unproven

SHAPES = [(), (4,), (3, 4), (2, 3, 1), (0, 4)]
DTYPES = [torch.float32, torch.float64, torch.int64]


def made(call: Callable[[], Tensor]) -> Any:
    try:
        found = call()
    except Exception as error:  # whatever torch raises
        return type(error)
    if found is NotImplemented:  # which Python makes an error of
        return TypeError
    return found.shape, found.dtype, found.device.type


def tensors() -> Iterator[Tensor]:
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        yield torch.empty(shape, dtype=dtype, device="meta")


def calls(func: Callable[..., Any]) -> Iterator[Callable[[], Any]]:
    """The function called in the ways that its kind can be called in, rightly and wrongly."""
    by_shape = unproven._GIVEN[func]
    for x in tensors():
        if by_shape is unproven._reduced:
            yield lambda x=x: func(x)
            for dim, keep in itertools.product((0, -1, 1, 5, (0, 1), None), (False, True)):
                yield lambda x=x, dim=dim, keep=keep: func(x, dim, keepdim=keep)
            yield lambda x=x: func(x, -1, dtype=torch.float64)
        elif by_shape is unproven._normalised:
            for p, dim in itertools.product((2, 1.5, 0, -1.0, float("inf")), (0, -1, 1, 5, (0, 1))):
                yield lambda x=x, p=p, dim=dim: func(x, p, dim)
            yield lambda x=x: func(x, dim=-1, eps=1e-3)
            yield lambda x=x: func(x, dim=-1, out=torch.empty_like(x))
        elif by_shape is unproven._in_a_row:
            for y, dim in itertools.product(tensors(), (0, -2, 3)):
                yield lambda x=x, y=y, dim=dim: func([x, y], dim)
                yield lambda x=x, y=y, dim=dim: func((x, y, x), dim=dim)
        elif by_shape is unproven._mapped:
            for shape, dtype in itertools.product([(5, 4), (4,), (5, 3), (5, 1), (2, 5, 4)], DTYPES[:2]):
                weight = torch.empty(shape, dtype=dtype, device="meta")
                yield lambda x=x, weight=weight: func(x, weight)
                yield lambda x=x, weight=weight: func(x, weight, weight.new_empty(5))
        else:
            yield lambda x=x: func(x)
            yield lambda x=x: func(x, other=2)
            for y in (2, 0.5, True, 1j, *tensors()):
                yield lambda x=x, y=y: func(x, y)


OWN = (
    unproven._changed,
    unproven._joined,
    unproven._reduced,
    unproven._normalised,
    unproven._in_a_row,
    unproven._mapped,
)


@pytest.mark.parametrize(
    "func", [f for f, by_shape in unproven._GIVEN.items() if by_shape in OWN], ids=lambda f: f.__name__
)
def test_what_is_made_by_shape_is_what_torch_makes(func: Callable[..., Any]) -> None:
    n_made = 0
    for call in calls(func):
        expected = made(call)
        with unproven._ByShape():
            found = made(call)
        assert found == expected
        n_made += not isinstance(found, type)
    assert n_made


def test_what_reads_no_values_keeps_its_shape() -> None:
    x = torch.empty(2, 3, 4, device="meta")
    with unproven._ByShape():
        for func in (functional.gelu, functional.relu, functional.silu, functional.dropout):
            assert made(lambda func=func: func(x)) == (x.shape, x.dtype, "meta")


def test_a_layer_with_one_weight_under_two_names_runs_without_data():
    layer = nn.ModuleDict({"one": nn.Linear(4, 4), "other": nn.Linear(4, 4)})
    layer["other"].weight = layer["one"].weight
    layer.forward = lambda x: layer["other"](layer["one"](x))
    assert unproven._runs_without_data(layer, (torch.empty(2, 4, device="meta"),), {}, None)
    assert not layer["one"].weight.is_meta
    assert layer["other"].weight is layer["one"].weight


@pytest.mark.parametrize("grad", [None, True, False])
def test_a_layer_runs_without_data_in_the_grad_mode_it_is_called_in_and_writes_where_it_may(grad):
    def forward(x, same):
        seen.append((torch.is_grad_enabled(), x is same))
        return torch.relu_(layer[0](x.add_(1)))

    layer, seen = nn.Sequential(nn.Linear(4, 4)), []
    layer.forward, x = forward, torch.empty(2, 4, device="meta", requires_grad=True)
    assert unproven._runs_without_data(layer, (x,), {"same": x}, None if grad is None else Region(grad))
    assert seen == [(grad is not False, True)]


@pytest.mark.parametrize(
    ("first", "second", "n_runs"),
    [
        (functools.partial(functional.gelu, approximate="tanh"),) * 2 + (1,),
        (functools.partial(functional.gelu, approximate="tanh"), functools.partial(functional.gelu), 2),
        (functools.partial(torch.mul, other=1), functools.partial(torch.mul, other=1.0), 2),
        (functools.partial(torch.mul, other=2), functools.partial(torch.mul, other=2), 1),
        (functools.partial(torch.mul, other=2), functools.partial(torch.add, other=2), 2),
        (functools.partial(torch.mul, other=[2]), functools.partial(torch.mul, other=[2]), 2),
    ],
)
def test_layers_around_the_same_function_given_the_same_run_once_without_data(
    first, second, n_runs, monkeypatch
):
    class Around(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function = functools.partial(function.func, *function.args, **function.keywords)

        def forward(self, x):
            return self.function(x)

    ran, runs = [], unproven._runs_without_data
    monkeypatch.setattr(unproven, "_runs_without_data", lambda *given: ran.append(0) or runs(*given))
    model = nn.Sequential(Around(first), Around(second))
    proofs = unproven.Proofs(model, functools.partial(kind_of, model))
    x = Call("placeholder", "x", value=torch.empty(2, 4, device="meta"))
    for path in ("0", "1"):
        proofs.of(Call("call_module", path, (x,)))
    assert len(ran) == n_runs


def test_a_layer_made_since_a_run_began_is_in_the_mode_that_it_is_in():
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    model = nn.Sequential(block)
    proofs = unproven.Proofs(model, functools.partial(kind_of, model))
    leaf = Call("call_module", "0", (Call("placeholder", "x", value=torch.empty(2, 4, device="meta")),))
    modes = {id(m): False for m in block.modules()}
    block.append(nn.Dropout(0.5))
    assert proofs.of(leaf, modes)
    assert proofs._known[proofs._key(leaf, modes)]
    assert all(m.training for m in block.modules())
