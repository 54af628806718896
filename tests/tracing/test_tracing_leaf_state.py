"""Calls of a leaf that keeps something of one for the next share a stage; other leaves' calls need not."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopipe.tracing import capture
from autopipe.tracing.code.attributes import names_of_open
from autopipe.tracing.code.leaf_state import Keeping, changed, codes_of, state_of
from autopipe.tracing.code.restart import WatchMethods

WIDTH = 8


class Spiking(nn.Module):
    """Keeps a potential from step to step."""

    def forward(self, x: Tensor, step: int) -> Tensor:
        if step == 0:
            self.potential = torch.zeros_like(x)
        self.potential = 0.9 * self.potential + x
        return torch.sigmoid(self.potential)


class Remembering(nn.Module):
    """Keeps a list of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, step: int) -> Tensor:
        if step == 0:
            self.seen.clear()
        self.seen.append(x)
        return torch.stack(self.seen).mean(0)


def named(forward: Any) -> Any:
    """A forward within another that goes by its name."""

    @functools.wraps(forward)
    def around(self: nn.Module, *args: Any) -> Any:
        return forward(self, *args)

    return around


def unnamed(forward: Any) -> Any:
    return lambda self, *args: forward(self, *args)


class Named(nn.Module):
    forward = named(Spiking.forward)


class Unnamed(nn.Module):
    forward = unnamed(Spiking.forward)


class Shown(nn.Module):
    """Keeps what it gave last for people to look at, and never reads it."""

    def forward(self, x: Tensor, step: int) -> Tensor:
        self.shown = torch.tanh(x)
        return torch.tanh(x)


class Cached(nn.Module):
    """Makes a table at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Any = None

    def forward(self, x: Tensor, step: int) -> Tensor:
        if self.table is None:
            self.table = torch.arange(WIDTH) / WIDTH
        return torch.tanh(x) + self.table


class Net(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        for step, layer in enumerate(self.layers):
            x = self.inside(layer(x), step)
        return x


@pytest.mark.parametrize("kind", [Spiking, Remembering, Named, Unnamed])
def test_calls_that_go_by_earlier_ones_share_a_stage(kind: type[nn.Module]) -> None:
    found = capture(Net(kind()), (torch.randn(2, WIDTH),))
    calls = {op.name for op in found.ops.compute if op.target == "inside"}
    assert len(calls) == 4
    assert any(calls <= {*group} for group in found.ops.groups)
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(found(x), found.model(x))


@pytest.mark.parametrize("kind", [Shown, Cached])
def test_what_no_call_goes_by_holds_nothing_together(kind: type[nn.Module]) -> None:
    found = capture(Net(kind()), (torch.randn(2, WIDTH),))
    assert not any("inside" in name for group in found.ops.groups for name in group)


class Redraws(nn.Module):
    """Counts calls in a buffer, and changes the layers that it was given when there were many."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers
        self.register_buffer("calls", torch.tensor(0))

    def redraw(self) -> None:
        if not self.training:
            return
        if self.calls >= 1000:
            for layer in self.layers:
                layer.reset_parameters()
            self.calls.zero_()
            return
        self.calls += 1


class CountsByMethod(nn.Module):
    """Has its layers redrawn every so often."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.redraws = Redraws(self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.redraws.redraw()
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_method_that_stays_whole_may_count_in_a_buffer() -> None:
    torch.manual_seed(0)
    model = CountsByMethod()
    x = torch.randn(2, 4)
    found = capture(model, (x,))
    found(x)
    assert model.redraws.calls == 1
    model.eval()
    torch.testing.assert_close(found(x), model(x))
    assert model.redraws.calls == 1


class Leaving(nn.Module):
    """Leaves a loss and features for others, and keeps to itself what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.features: dict[str, Tensor] = {}
        self.shape: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.layers[0](x)
        self.shown, self.shape = self.hidden.detach(), x.shape
        self.loss = self.hidden.square().mean()
        self.features["last"] = self.layers[1](self.hidden)
        return self.layers[2](self.features["last"])


def test_what_is_left_for_others_is_told(caplog: Any) -> None:
    found = capture(Leaving(), (torch.randn(2, WIDTH),))
    assert found.left == ("features", "loss")
    (record,) = caplog.records
    assert "Leaving's forward leaves in features, loss what it computes" in record.getMessage()


class Hooked(nn.Module):
    """Reads what hooks of its layers have put into an attribute, and into a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.features: dict[str, Tensor] = {}
        self.scale = 1.0
        self.layers[0].register_forward_hook(lambda m, args, out: setattr(self, "first", out))
        self.layers[1].register_forward_hook(lambda m, args, out: self.features.update(last=out))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layers[2](self.layers[1](self.layers[0](x).relu()))
        return self.scale * (out + self.first + self.features["last"])


def test_what_hooks_of_layers_put_into_a_model_is_no_change_of_it() -> None:
    model, beside = Hooked(), Hooked()
    beside.load_state_dict(model.state_dict())
    found = capture(model, (torch.randn(2, WIDTH),))
    for _ in range(12):
        x = torch.randn(2, WIDTH)
        torch.testing.assert_close(found(x), beside(x))
        assert not found.assumptions.changed()
    model.scale = beside.scale = 2.0
    torch.testing.assert_close(found(x), beside(x))


def test_leaves_set_their_attributes_themselves(caplog: Any) -> None:
    model = nn.Sequential(Leaving(), nn.Linear(WIDTH, WIDTH))
    found = capture(model, (torch.randn(2, WIDTH),), closed=["0"])
    assert found.left == ()
    assert not caplog.records


def test_code_of_a_class_is_looked_for_anew_where_its_methods_are_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    class Derived(Layer):
        pass

    def forward(self: Layer, x: Tensor) -> Tensor:
        return x + 1

    before = codes_of(Derived)
    assert codes_of(Derived) is before
    monkeypatch.setattr(Layer, "forward", forward)
    assert codes_of(Derived) == (forward.__code__,)


def test_what_runs_as_classes_are_made_is_no_code_of_forwards():
    class Registered(nn.Module):
        def __init_subclass__(cls) -> None:
            cls.held = {**cls.__dict__}

    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.part.__dict__["factor"]

    assert "__dict__" not in names_of_open(frozenset({Registered}))
    assert "__dict__" in names_of_open(frozenset({Asking}))


class CountsOnItsClass(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        self.n = getattr(self, "n", 0) + 1
        return self.linear(x)


def test_an_attribute_that_a_class_has_lost_since_is_none():
    CountsOnItsClass.n = 0
    inside = [CountsOnItsClass()]
    before = state_of(inside)
    del CountsOnItsClass.n
    assert len([*changed(before, state_of(inside))]) == 1


class Plenty(nn.Module):
    """Goes by all kinds of things that it holds."""

    of_class = 1

    def __init__(self) -> None:
        super().__init__()
        self.number, self.names, self.table = 1, ["a"], {"a": 1}
        self.held, self.tensor = Box(), torch.zeros(2)
        self.chosen, self.queue, self.array = Chosen({1}), collections.deque([1]), np.zeros(2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.of_class = self.of_class + 0
        used = (self.number, self.names, self.table, self.held, self.chosen, self.queue, self.array)
        return x + len(used) + self.tensor + self.mean


class Box:
    def __init__(self) -> None:
        self.value = 1


class Chosen(set):  # type: ignore[type-arg]
    """Has a place for attributes beside what is in it."""


def _boxed(module: Any) -> None:
    module.held.__dict__ = {"value": 2}


SETTING: dict[str, Callable[[Any], Any]] = {
    "a number": lambda m: setattr(m, "number", 2),
    "a list": lambda m: m.names.append("b"),
    "a dict": lambda m: m.table.update(a=2),
    "an object": lambda m: setattr(m.held, "value", 2),
    "an object's dict": _boxed,
    "a tensor": lambda m: m.tensor.add_(1),
    "a set with attributes": lambda m: m.chosen.add(2),
    "a deque": lambda m: m.queue.append(2),
    "an array": lambda m: m.array.__setitem__(0, 1),
    "a buffer": lambda m: setattr(m, "mean", torch.ones(2)),
    "a class": lambda m: setattr(type(m), "of_class", 2),
}


UNCOUNTED = {"a list": "names", "a set with attributes": "chosen", "a deque": "queue", "an array": "array"}
"""What counts no changes, by what holds it."""


@pytest.mark.parametrize("is_counted", [False, True])
@pytest.mark.parametrize("setting", SETTING)
def test_all_that_is_set_on_a_leaf_is_seen_in_its_calls_and_between_them(
    setting: str, is_counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Plenty, "of_class", 1)
    module = Plenty()
    if setting != "a class":
        module.of_class = 1
    for name in UNCOUNTED.values() if is_counted and setting not in UNCOUNTED else ():
        setattr(module, name, None)
    keeping = Keeping({id(module): "leaf"}, ())
    keeping.begin([module], [])
    assert not keeping.after("leaf", [module], keeping.before("leaf", [module]))
    assert not keeping.begun
    before = keeping.before("leaf", [module])
    SETTING[setting](module)
    assert keeping.after("leaf", [module], before)
    keeping.before("leaf", [module])
    module.number = 3
    with pytest.raises(WatchMethods):
        keeping.before("leaf", [module])


def test_what_is_set_ahead_of_a_leafs_call_is_seen() -> None:
    for setting in SETTING.values():
        module = Plenty()
        keeping = Keeping({id(module): "leaf"}, ())
        keeping.begin([module], [])
        setting(module)
        with pytest.raises(WatchMethods):
            keeping.before("leaf", [module])
        Plenty.of_class = 1
