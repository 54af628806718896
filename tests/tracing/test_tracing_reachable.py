"""Code behind a branch on an attribute that is False is none that goes by the mode; all other code may be."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from autopipe.tracing import capture
from autopipe.tracing.calls.call import Call
from autopipe.tracing.code import reachable
from autopipe.tracing.code.own_code import OwnCode
from autopipe.tracing.code.reachable import names_reached
from autopipe.tracing.rows import mixing


class Owner:
    """Has the flags that methods ask for."""

    off = False
    on = True

    def both(self, other: Any) -> bool:
        return self.off and self.training

    def branch(self, other: Any) -> int:
        if self.off and self.training and other:
            return 1
        return 2

    def early(self, other: Any) -> int:
        if not self.off:
            return 1
        return 2 if self.training else 3

    def loop(self, other: Any) -> Any:
        while self.off:
            other = self.training
        return other

    def either(self, other: Any) -> bool:
        return self.off or self.training

    def true(self, other: Any) -> bool:
        return self.on and self.training

    def missing(self, other: Any) -> bool:
        return self.nowhere and self.training

    def of_another(self, other: Any) -> bool:
        return other.off and self.training

    def chosen(self, other: Any) -> int:
        if (other if other else self.off) and self.training:
            return 1
        return 2

    def changed(self, other: Any) -> int:
        self = other
        if self.off and self.training:
            return 1
        return 2

    def catching(self, other: Any) -> int:
        try:
            if self.off and self.training:
                return 1
        except ValueError:
            return 3
        return 2

    def inner(self, other: Any) -> Any:
        return lambda: self.training

    @property
    def told(self) -> bool:
        return self.on

    def behind_told(self, other: Any) -> bool:
        return self.told and self.training


class Odd(Owner):
    """Answers for itself what it has."""

    def __getattribute__(self, name: str) -> Any:
        return True if name == "off" else super().__getattribute__(name)


@pytest.mark.parametrize("name", ["both", "branch", "early", "loop"])
def test_what_lies_behind_a_false_attribute_is_not_reached(name: str) -> None:
    function, other = vars(Owner)[name], Owner()
    assert "training" not in names_reached(function, [Owner(), other], ())
    assert "training" in names_reached(function, [Owner()], ["off"])
    assert "training" in names_reached(function, [], ())
    assert "training" in names_reached(function, [Owner(), object()], ())
    assert "training" in names_reached(function, [Odd()], ())
    vars(other)["off"] = True
    assert "training" in names_reached(function, [Owner(), other], ())
    vars(other)["off"] = 0
    assert "training" in names_reached(function, [other], ())


@pytest.mark.parametrize(
    "name",
    [
        "behind_told", "catching", "changed", "chosen", "either", "inner", "missing", "of_another", "true",
    ],
)  # fmt: skip
def test_all_else_is_reached(name: str) -> None:
    assert "training" in names_reached(vars(Owner)[name], [Owner()], ())


@pytest.mark.parametrize(
    ("name", "held", "is_written"),
    [
        ("STORE_FAST", "self", True),
        ("STORE_FAST_STORE_FAST", ("other", "self"), True),
        ("STORE_FAST_STORE_FAST", ("other", "another"), False),
        ("STORE_FAST_LOAD_FAST", ("self", "other"), True),
        ("STORE_FAST_LOAD_FAST", ("other", "self"), False),
        ("LOAD_FAST_LOAD_FAST", ("self", "other"), False),
    ],
)
def test_a_step_that_changes_two_variables_changes_either(name: str, held: Any, is_written: bool) -> None:
    step: Any = types.SimpleNamespace(opname=name, argval=held)
    assert reachable._is_written(step, "self") is is_written


class Mixing(nn.Module):
    """A layer that mixes many rows in training if it is told to; ``sets`` names what its code sets."""

    is_mixing = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x)
        if self.is_mixing and self.training and len(x) > 3:
            return made - made.mean(0)
        return made


class Telling(Mixing):
    """The same, but that it tells itself to as it is called."""

    def forward(self, x: Tensor) -> Tensor:
        self.is_mixing = True
        made = super().forward(x)
        del self.is_mixing
        return made


class Setting(Mixing):
    """The same, by Python's own function."""

    def forward(self, x: Tensor) -> Tensor:
        setattr(self, TOLD, True)
        made = super().forward(x)
        delattr(self, TOLD)
        return made


class Filling(Mixing):
    """The same, in the dict of what it has."""

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["is_mixing"] = True
        made = super().forward(x)
        del self.__dict__["is_mixing"]
        return made


class Patching(Mixing):
    """The same, by a library that sets it meanwhile."""

    def forward(self, x: Tensor) -> Tensor:
        with mock.patch.object(self, "is_mixing", True):
            return super().forward(x)


class Hooked(Mixing):
    """The same, by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda layer, _: setattr(layer, TOLD, True))
        self.register_forward_hook(lambda layer, *_: delattr(layer, TOLD))


TOLD = "_".join(("is", "mixing"))


class Around(nn.Module):
    """Tells a layer to mix as it calls it; a capture sees that."""

    def __init__(self, tell: Callable[[Mixing, bool], None]) -> None:
        super().__init__()
        self.first, self.layer, self.tell = nn.Linear(4, 4), Mixing(), tell

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        self.tell(self.layer, True)
        x = self.layer(x)
        self.tell(self.layer, False)
        return x


class Wrapping(nn.Module):
    """Wraps the forward of each class that is derived from it."""

    is_mixing = False

    def __init_subclass__(cls) -> None:
        forward = cls.forward

        @functools.wraps(forward)
        def wrapped(self: Any, x: Tensor) -> Any:
            made = forward(self, x)
            return made - made.mean(0) if self.is_mixing and self.training and len(x) > 3 else made

        cls.forward = wrapped


class Wrapped(Wrapping):
    """A layer that is wrapped so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x)


def one_of_two(cls: Any) -> nn.Module:
    layer = nn.Sequential(cls(), cls())
    layer[1].is_mixing = True
    return layer


@pytest.mark.parametrize(
    ("make", "is_mixed"),
    [
        (Mixing, False),
        (Wrapped, False),
        (Telling, True),
        (Setting, True),
        (Filling, True),
        (Patching, True),
        (Hooked, True),
        (lambda: one_of_two(Mixing), True),
        (lambda: one_of_two(Wrapped), True),
    ],
)
def test_many_rows_are_mixed_in_training_alone_where_a_layer_is_told_to(
    make: Callable[[], nn.Module], is_mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[bool] = []
    asked_of = mixing._asked_of

    def noting(form: Any, *told: Any, **named: Any) -> str:
        modes.append(named["may_point"])
        return asked_of(form, *told, **named)

    monkeypatch.setattr(mixing, "_asked_of", noting)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, 4))
    found = capture(model, (torch.randn(2, 4),), closed=["1"]).variation.mixing
    assert bool(found.training) is is_mixed
    assert modes == [True]


@pytest.mark.parametrize("n_rows", [2, 6])
def test_what_code_around_a_layer_tells_it_is_known(n_rows: int) -> None:
    torch.manual_seed(0)
    model = Around(lambda layer, is_mixing: setattr(layer, "is_mixing", is_mixing))
    assert capture(model, (torch.randn(n_rows, 4),), closed=["layer"]).variation.mixing.training


class Flagged(nn.Module):
    """Names its mode behind a flag."""

    def __init__(self, *, is_on: bool) -> None:
        super().__init__()
        self.is_on, self.number = is_on, int(is_on) + 5

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.is_on and self.training else x


def test_layers_that_are_alike_are_looked_into_once_and_others_each() -> None:
    model = nn.Sequential(*(Flagged(is_on=i == 3) for i in range(5)))
    code = OwnCode(model)
    form: Any = types.SimpleNamespace(calls=[])
    with mock.patch.object(OwnCode, "_names_mode", autospec=True, side_effect=OwnCode._names_mode) as looked:
        found = [code.may_go_by_mode(Call("call_module", str(i)), form) for i in range(5)]
    assert found == [False, False, False, True, False]
    assert looked.call_count == 2
