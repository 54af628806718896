"""Globals beside a model's class: those that its code names are held against the capture, others are not."""

from __future__ import annotations

import functools
import sys
import types

import pytest
import torch
from torch import Tensor, nn

import autopipe

losses: list[float] = []
history: dict[int, float] = {}
n_steps = 0
gain = 1.0  # what a script sets the model's own to
spare = nn.Linear(2, 2)
SCALE = 2.0
OFFSETS = {"first": 1.0}
POWER = 1.0
SHIFT = 0.0


def _powered(x: Tensor) -> Tensor:
    return x**POWER


def decorated(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args) + SHIFT

    return inner


class Scaled(nn.Module):
    """Uses globals directly, in a function it calls and in a decorator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.gain = 1.0

    @decorated
    def forward(self, x: Tensor) -> Tensor:
        return _powered(self.layers(x) * self.gain * SCALE + OFFSETS["first"])


@pytest.fixture
def pipe():
    torch.manual_seed(0)
    return autopipe.split(Scaled(), 2, (torch.randn(8, 4),), costs="estimated")


def test_what_a_training_script_gathers_is_none_of_the_models(pipe):
    global n_steps, gain
    losses.append(1.0)
    history[3] = 0.5
    n_steps += 1
    gain = 2.0
    try:
        assert pipe.graph.assumptions.changed() == []
    finally:
        losses.clear()
        history.clear()
        n_steps, gain = 0, 1.0


@pytest.mark.parametrize(
    ("name", "value"), [("SCALE", 3.0), ("POWER", 2.0), ("SHIFT", 1.0), ("OFFSETS", 2.0)]
)
def test_what_its_code_names_is_noticed(pipe, monkeypatch, name, value):
    x = torch.randn(8, 4)
    before = pipe(x)
    if name == "OFFSETS":
        monkeypatch.setitem(OFFSETS, "first", value)
    else:
        monkeypatch.setitem(globals(), name, value)
    assert pipe.graph.assumptions.changed()
    torch.testing.assert_close(pipe(x), pipe.model(x))
    assert not torch.equal(pipe(x), before)
    monkeypatch.undo()
    assert torch.equal(pipe(x), before)


seen: list[object] = []
counted: list[object] = []


def note(x: Tensor) -> Tensor:
    seen.append(tuple(x.shape))
    return x


def note_value(x: Tensor) -> Tensor:
    seen.append(x.mean().item())
    return x


def count(x: Tensor) -> Tensor:
    counted.append(x.shape)
    return x * len(counted)


class Noting(nn.Module):
    """A block that runs a helper on what it makes."""

    def __init__(self, helper):
        super().__init__()
        self.linear, self.helper = nn.Linear(4, 4), helper

    def forward(self, x: Tensor) -> Tensor:
        return self.helper(self.linear(x)).tanh()


class Noted(nn.Module):
    """Runs a helper in its layers, or itself where it ``opens`` them."""

    def __init__(self, helper, opens):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) if opens else Noting(helper) for _ in range(4))
        self.helper, self.opens = helper, opens

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = self.helper(x) if self.opens else x
        return x


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("helper", [note, note_value])
def test_a_log_that_code_only_adds_to_stands_in_no_way(helper, opens):
    torch.manual_seed(0)
    model, x = Noted(helper, opens), torch.randn(4, 4)
    seen[:] = ["before"]
    pipe = autopipe.split(model, 2, (x,), costs="estimated", n_microbatches=2)
    assert seen == ["before"]
    rt = pipe.runtime(loss_fn=nn.functional.mse_loss)
    for n_rows in (4, 5):
        x = torch.randn(n_rows, 4)
        loss = rt.step(x, target=torch.zeros(n_rows, 4)).loss
        torch.testing.assert_close(loss, model(x).square().mean().detach())


@pytest.mark.parametrize("opens", [True, False])
def test_a_log_that_code_goes_by_is_refused(opens):
    counted.clear()
    with pytest.raises(autopipe.CaptureError, match="counted of"):
        autopipe.capture(Noted(count, opens), (torch.randn(4, 4),))


class Log(list):
    """Has code of its own where something is added to it."""

    def append(self, value: object) -> None:
        super().append(value)
        self.is_long = len(self) > 30


HELD = """
import functools

log = []
table = {"log": log}
size, shortened = log.__len__, functools.partial(len, log)


class Meter:
    log = log

    @property
    def size(self):
        return len(self.log)


def with_default(held=log):
    return len(held)


def closed(held):
    return lambda: len(held)


within = closed(log)


def helper(x):
    log.append(len(x))
    return x * 2 if COUNT > 30 else x
"""


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize(
    "count", ["len(table['log'])", "size()", "shortened()", "Meter().size", "with_default()", "within()"]
)
def test_a_log_that_something_else_holds_too_is_refused(monkeypatch, count, opens):
    held = types.ModuleType("held_elsewhere")
    monkeypatch.setitem(sys.modules, held.__name__, held)
    exec(HELD.replace("COUNT", count), vars(held))
    with pytest.raises(autopipe.CaptureError, match="calls one after another"):
        autopipe.capture(Noted(held.helper, opens), (torch.randn(4, 4),))


@pytest.mark.parametrize("holder", ["model", "class"])
def test_a_log_that_the_model_or_its_class_has_by_another_name_is_refused(holder):
    class Counting(Noted):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y * 2 if len(self.log) > 30 else y

    seen.clear()
    model = Counting(note, True)
    (model if holder == "model" else Counting).log = seen
    with pytest.raises(autopipe.CaptureError, match="log of Counting"):
        autopipe.capture(model, (torch.randn(4, 4),))


def test_a_list_with_a_method_of_its_own_for_adding_is_no_log(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "seen", Log())
    with pytest.raises(autopipe.CaptureError, match="seen of"):
        autopipe.capture(Noted(note, True), (torch.randn(4, 4),))


LOADED = """
from torch import nn

GAIN = 2.0


class Loaded(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def forward(self, x):
        return self.layers(x) * GAIN
"""


@pytest.mark.parametrize("has_another", [True, False], ids=["another of the name", "of no module"])
def test_globals_are_those_of_the_code_whoever_else_has_their_name(monkeypatch, has_another):
    name = "loaded_twice"
    if has_another:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    space = {"__name__": name}
    exec(LOADED, space)
    model, x = space["Loaded"](), torch.randn(2, 4)
    pipe = autopipe.split(model, 2, (x,), costs="estimated")
    assert torch.equal(pipe(x), model(x))
    space["GAIN"] = 3.0
    assert [str(change) for change in pipe.graph.assumptions.changed()] == ["a global of loaded_twice"]
    torch.testing.assert_close(pipe(x), model(x))
