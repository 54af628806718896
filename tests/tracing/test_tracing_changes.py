"""State that changes after a capture: recorded again where it is new, and never without end."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from autopipe import split
from autopipe.errors import CaptureError, InputError
from autopipe.tracing import capture
from autopipe.tracing.record.identity import compares
from autopipe.tracing.state import global_hooks


class Layers(nn.Module):
    """Reads a number that its user sets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.step, self.kind = 0, "a"

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * 2 if self.step > 1000 or self.kind == "c" else x


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[int]]:
    """A capture of the model, and a list that grows where it is recorded again."""
    import sys

    room = sys.modules["autopipe.tracing.capture"]

    found, times = capture(Layers().eval(), (torch.randn(2, 3, 4),)), [0]
    original = room._capture

    def counted(*args: Any, **kwargs: Any) -> Any:
        times[0] += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(room, "_capture", counted)
    return found, times


def test_a_state_that_was_met_is_not_recorded_again(captured: Any) -> None:
    found, times = captured
    x = torch.randn(2, 3, 4)
    for kind in "abababab":
        found.model.kind = kind
        torch.testing.assert_close(found(x), found.model(x))
    assert times == [1]
    for kind in "cacbca":
        found.model.kind = kind
        torch.testing.assert_close(found(x), found.model(x))
    assert times == [3]  # to see that "c" is another, and to record it


def test_a_number_that_is_new_at_each_call_is_an_input(captured: Any) -> None:
    found, times = captured
    for step in [*range(1, 12), 999, 1000, 1001, 1002, 3]:
        found.model.step = step
        x = torch.randn(2, 3, 4)
        torch.testing.assert_close(found(x), found.model(x))
    assert times == [3]
    assert [kind.inputs.held for kind in found.kinds] == [(), ("step",)]


def test_an_object_that_is_new_at_each_call_is_refused_after_some(captured: Any) -> None:
    found, times = captured
    x = torch.randn(2, 3, 4)
    for _ in range(8):
        found.model.other = object()
        found(x)
    found.model.other = object()
    with pytest.raises(InputError, match=r"attributes of Layers.* changes before every call"):
        found(x)
    assert times == [8]


def test_a_state_that_changes_now_and_then_is_not_refused(captured: Any) -> None:
    found, times = captured
    x = torch.randn(2, 3, 4)
    for _ in range(10):
        found.model.other = object()
        found(x)
        found(x)
    assert times == [10]


def _kept(module: Any, args: Any, result: Any) -> None:
    module.kept = result


def _shifted(module: Any, args: Any, result: Any) -> None:
    result += 1


def _or_none(module: Any, args: Any, result: Any) -> Any:
    return (isinstance(module, nn.Linear) and result * 2) or None


@pytest.mark.parametrize("hook", [_kept, _shifted, _or_none, functools.partial(_kept)])
def test_hooks_on_all_modules_that_may_act_are_refused(hook: Any) -> None:
    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        with pytest.raises(CaptureError, match="global module hooks"):
            capture(Layers(), (torch.randn(2, 3, 4),))
    finally:
        handle.remove()


def test_hooks_on_all_modules_that_only_look_see_stages_and_no_recording(caplog: Any) -> None:
    model, x, seen = Layers(), torch.randn(2, 3, 4), []
    global_hooks._say_once.cache_clear()

    def look(module: nn.Module, args: Any, result: Any) -> None:
        if isinstance(module, nn.Module):
            seen.append(module)

    handle = nn.modules.module.register_module_forward_hook(look)
    try:
        pipe = split(model, 2, (x,), costs="estimated")
        assert model not in seen
        assert torch.equal(pipe(x), model(x))
        assert {*pipe.stages} < {*seen}
    finally:
        handle.remove()
    assert "by stage" in caplog.text


def test_operations_are_counted_as_the_model_runs_them() -> None:
    model, x = Layers(), torch.randn(2, 3, 4)
    pipe = split(model, 2, (x,), costs="estimated")
    with FlopCounterMode(display=False) as own:
        model(x).sum().backward()
    with FlopCounterMode(display=False) as ours:
        pipe(x).sum().backward()
    assert ours.get_total_flops() == own.get_total_flops() > 0


def test_what_keeps_a_changed_model_from_being_recorded_is_told(captured: Any) -> None:
    found, _ = captured
    handle = nn.modules.module.register_module_forward_hook(_kept)
    try:
        with pytest.raises(InputError, match=r"changed after the capture.*would run for stages too") as told:
            found(torch.randn(2, 3, 4))
    finally:
        handle.remove()
    assert "acts on it" not in str(told.value)
    found(torch.randn(2, 3, 4))


class Paired(Layers):
    """Acts otherwise where it is given one tensor twice."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x * 3 if x is y else x + y)


def test_one_tensor_in_two_places_is_refused_where_the_model_tells() -> None:
    model = Paired().eval()
    x, y = torch.randn(2, 2, 3, 4)
    found = capture(model, (x, y))
    torch.testing.assert_close(found(x, y), model(x, y))
    with pytest.raises(InputError, match="arguments x and y are one tensor"):
        found(x, x)


def test_only_variables_are_compared_by_identity() -> None:
    assert compares(Paired())
    assert not compares(Layers())


class ByName(Layers):
    """Compares in what a call comes to by a text, or in a method that no call of the model comes to."""

    def __init__(self, chosen: str) -> None:
        super().__init__()
        self.chosen = chosen

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(getattr(self, "joined")(x, y) if self.chosen else x)  # noqa: B009

    def joined(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def tie(self, other: Layers) -> bool:
        return self is other


class Comparing(ByName):
    def joined(self, x: Tensor, y: Tensor) -> Tensor:
        return x * 3 if x is y else x + y


def wrapped(forward: Any) -> Any:
    """Asks which function is the outermost, and no values."""

    def outermost(self: nn.Module, *args: Any) -> Any:
        return forward(self, *args) if type(self).forward is outermost else None

    return outermost


class Wrapped(Layers):
    forward = wrapped(Layers.forward)


def calling_one_another() -> tuple[Any, Any]:
    """Two functions each of which has the other from around it."""

    def even(self: nn.Module, n: int) -> bool:
        return n == 0 or odd(self, n - 1)

    def odd(self: nn.Module, n: int) -> bool:
        return n != 0 and even(self, n - 1)

    return even, odd


class Recursive(Layers):
    is_even, is_odd = calling_one_another()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.is_even(3) else x + 1)


def test_code_that_a_call_does_not_come_to_compares_nothing() -> None:
    assert not compares(Recursive())
    assert compares(Comparing("joined"))
    assert not compares(ByName("joined"))
    assert not compares(Wrapped())
    hooked = Layers()
    hooked.register_forward_hook(lambda module, args, output: args[0] if args[0] is output else None)
    assert compares(hooked)


class InOneMode(nn.Module):
    """Acts in one mode alone on a number that its user sets, and on a list."""

    def __init__(self, mode: bool) -> None:
        super().__init__()
        self.layer, self.mode, self.scale, self.parts = nn.Linear(4, 4), mode, 1.0, [0.0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x * self.scale + sum(self.parts) if self.training is self.mode else x


@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize("change", [{"scale": 5.0}, {"parts": [1.0, 2.0]}])
def test_what_makes_no_difference_in_one_mode_may_in_the_other(mode: bool, change: dict[str, Any]) -> None:
    found, x = capture(InOneMode(mode), (torch.randn(2, 4),)), torch.randn(2, 4)
    for name, value in change.items():
        setattr(found.model, name, value)
    for _ in range(2):
        found.model.train(not mode)
        torch.testing.assert_close(found(x), found.model(x))
        found.model.train(mode)
        torch.testing.assert_close(found(x), found.model(x))


def test_a_model_that_now_fails_on_its_example_is_refused_with_that_as_the_cause() -> None:
    model = Layers().eval()
    found = capture(model, (torch.randn(2, 3, 4),))
    model.double()
    with pytest.raises(InputError, match=r"now the model fails on the example .*must have the same dtype"):
        found(torch.randn(2, 3, 4, dtype=torch.float64))
    model.float()
    x = torch.randn(2, 3, 4)
    assert torch.equal(found(x), model(x))


class Scaled(nn.Module):
    """Two layers, and what a function makes of numbers between them."""

    def __init__(self, function: Any, held: Any = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function, self.held = function, held

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        return self.b(self.function(self.a(x), self.held if given is None else given))


def read(x: Tensor, held: Any) -> Tensor:
    return x * float(held().sum()) if callable(held) else x * float(held.sum())


def used(x: Tensor, held: Any) -> Tensor:
    return x * (held() if callable(held) else held)


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("function", [read, used])
def test_a_tensor_that_no_call_makes_may_change(function: Any, is_given: bool) -> None:
    held, x = torch.ones(4), torch.randn(2, 4)
    model = Scaled(function, None if is_given else held)
    args = (x, lambda: held) if is_given else (x,)
    found = capture(model, args)
    torch.testing.assert_close(found(*args), model(*args))
    held.numpy()[:] = -3.0
    torch.testing.assert_close(found(*args), model(*args))
    held.fill_(1.0)
    torch.testing.assert_close(found(*args), model(*args))
    assert len(found.kinds) == (1 if function is used else 2)


def checked(x: Tensor, held: Any) -> Tensor:
    x = x * held
    if x.isnan().any():
        raise ValueError("not a number")
    return x


def test_a_tensor_that_only_what_is_checked_is_made_of_may_change_before_every_call() -> None:
    held, x = torch.ones(4), torch.randn(2, 4)
    model = Scaled(checked, held)
    found = capture(model, (x,))
    for _ in range(10):
        held.mul_(0.9)
        torch.testing.assert_close(found(x), model(x))
    with pytest.raises(InputError, match="a check of the data"):
        found(x * torch.nan)
