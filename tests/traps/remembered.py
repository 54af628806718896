"""State that Python keeps where few look: slots, defaults, closures, classes, arrays, other files."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import itertools
import random
import types
import weakref
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import aside
from .aside import Settings, counted, scaled, ticking
from .registry import WIDTH, Net, trap

TURNS: contextvars.ContextVar[int] = contextvars.ContextVar("TURNS", default=0)
STRENGTH: contextvars.ContextVar[float] = contextvars.ContextVar("STRENGTH", default=1.0)
HELD: Any = types.SimpleNamespace(scale=2.0)
RATES = {"scale": 2.0}
OFFSET = torch.zeros(WIDTH)
TOTAL = torch.zeros(WIDTH)
SEEN: Any = weakref.WeakKeyDictionary()
_tick = ticking()
_normal = np.random.default_rng(0).normal
_uniform = random.Random(0).random


@dataclasses.dataclass(slots=True)
class Tally:
    """Counts in a slot."""

    calls: int = 0
    scale: float = 1.0


class Ticker:
    """An object that is called, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


TICKER = Ticker()


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


@trap("refused", tally=Tally)
def counter_in_a_slot(self: Any, x: Tensor) -> Tensor:
    self.tally.calls += 1
    return self.run(x * 2 if self.tally.calls > 5 else x)


@trap(tally=Tally, later=lambda m: setattr(m.tally, "scale", 3.0))
def slot_changed_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x * self.tally.scale)


@trap("refused")
def counter_in_a_default(self: Any, x: Tensor, seen: Any = []) -> Tensor:  # noqa: B006
    seen.append(1)
    return self.run(x * 2 if len(seen) > 5 else x)


def _summed(x: Tensor, total: Any = {"n": 0}) -> Tensor:  # noqa: B006
    total["n"] += 1
    return x * 2 if total["n"] > 5 else x


@trap("refused")
def counter_in_the_default_of_a_helper(self: Any, x: Tensor) -> Tensor:
    return self.run(_summed(x))


@trap("refused")
def tensor_kept_in_a_default(self: Any, x: Tensor, total: Tensor = TOTAL) -> Tensor:
    total += x.detach().mean((0, 1))
    return self.run(x - total)


def _noted(x: Tensor) -> Tensor:
    _noted.calls = getattr(_noted, "calls", 0) + 1  # type: ignore[attr-defined]
    return x * 2 if _noted.calls > 5 else x  # type: ignore[attr-defined]


@trap("refused")
def counter_on_a_function(self: Any, x: Tensor) -> Tensor:
    return self.run(_noted(x))


@trap("refused")
def counter_in_a_closure_of_the_file(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if _tick() > 5 else x)


@trap("refused")
def counter_in_an_object_that_is_called(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if TICKER() > 5 else x)


def _limited(method: Any) -> Any:
    """A decorator that counts."""
    calls = 0

    @functools.wraps(method)
    def limited(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return method(*args) * (2 if calls > 5 else 1)

    return limited


@trap("refused")
class CounterInADecorator(Net):
    """Whose forward is wrapped by what counts its calls."""

    @_limited
    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


@trap("refused")
def counter_on_a_plain_class(self: Any, x: Tensor) -> Tensor:
    Settings.calls += 1
    return self.run(x * 2 if Settings.calls > 5 else x)


@trap(later=lambda m: setattr(Settings, "scale", 5.0))
def plain_class_changed_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x * Settings.scale)


@trap(settings=lambda: Settings, later=lambda m: Settings.depth.update(first=4.0))
def class_held_and_changed_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x * self.settings.depth["first"])


@trap("refused")
def counter_in_another_file(self: Any, x: Tensor) -> Tensor:
    return self.run(counted(x))


@trap(later=lambda m: setattr(aside, "SCALE", 3.0))
def another_file_changed_later(self: Any, x: Tensor) -> Tensor:
    return self.run(scaled(x))


@trap(later=lambda m: aside.LIMITS.update(most=0.5))
def name_of_another_file_changed_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x.clamp(max=aside.LIMITS["most"]))


@trap("refused")
def counter_in_a_context_variable(self: Any, x: Tensor) -> Tensor:
    TURNS.set(TURNS.get() + 1)
    return self.run(x * 2 if TURNS.get() > 5 else x)


@trap(later=lambda m: STRENGTH.set(3.0))
def context_variable_changed_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x * STRENGTH.get())


@trap("refused", counts=lambda: np.zeros(2))
def counter_in_an_array(self: Any, x: Tensor) -> Tensor:
    self.counts[0] += 1
    return self.run(x * 2 if self.counts[0] > 5 else x)


@trap(rates=lambda: np.ones(WIDTH), later=lambda m: m.rates.fill(3.0))
def array_changed_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x * torch.tensor(self.rates).float() + float(self.rates[0]))


@trap("refused")
class NumberOfEachCall(Net):
    """Takes a number from an iterator of the class."""

    numbers = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x * 2 if next(self.numbers) > 5 else x)


@trap("refused")
def bound_draw_of_numpy(self: Any, x: Tensor) -> Tensor:
    return self.run(x * float(_normal()))


@trap("refused")
def bound_draw_of_python(self: Any, x: Tensor) -> Tensor:
    return self.run(x * _uniform() if self.training else x)


@trap(later=lambda m: globals().update(HELD=types.SimpleNamespace(scale=HELD.scale + 1)))
def object_of_the_file_replaced_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x * HELD.scale)


@trap(later=lambda m: globals().update(RATES={"scale": RATES["scale"] + 1}))
def dict_of_the_file_replaced_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x * RATES["scale"])


@trap(later=lambda m: globals().update(OFFSET=OFFSET + 1))
def tensor_of_the_file_replaced_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x + OFFSET)


@trap("refused")
def counter_by_weak_key(self: Any, x: Tensor) -> Tensor:
    SEEN[self] = SEEN.get(self, 0) + 1
    return self.run(x * 2 if SEEN[self] > 5 else x)


@trap("refused", seen=list)
def long_history(self: Any, x: Tensor) -> Tensor:
    self.seen.append(x.size(1))
    return self.run(x * 2 if len(self.seen) > 5 else x)


@trap("refused", seen=dict)
def history_by_number(self: Any, x: Tensor) -> Tensor:
    self.seen[len(self.seen)] = x.size(1)
    return self.run(x * 2 if len(self.seen) > 5 else x)


@trap("refused", seen=collections.deque)
def history_in_a_deque(self: Any, x: Tensor) -> Tensor:
    self.seen.append(x.size(1))
    return self.run(x * 2 if len(self.seen) > 5 else x)


@trap("refused", seen=set)
def history_in_a_set(self: Any, x: Tensor) -> Tensor:
    self.seen.add(len(self.seen))
    return self.run(x * 2 if len(self.seen) > 5 else x)


@trap("refused", seen=lambda: {0})
def history_in_a_set_with_a_member(self: Any, x: Tensor) -> Tensor:
    self.seen.add(len(self.seen))
    return self.run(x * 2 if len(self.seen) > 6 else x)


@trap("refused", seen=lambda: types.SimpleNamespace(shapes=[]))
def history_in_an_object(self: Any, x: Tensor) -> Tensor:
    self.seen.shapes.append(tuple(x.shape))
    return self.run(x * 2 if len(self.seen.shapes) > 5 else x)


@trap("safe", seen=set)
def widths_met(self: Any, x: Tensor) -> Tensor:
    self.seen.add(x.size(-1))
    return self.run(x * len(self.seen))


@trap("refused", seen=lambda: ([0], "n"))
def counter_in_a_list_in_a_tuple(self: Any, x: Tensor) -> Tensor:
    self.seen[0][0] += 1
    return self.run(x * 2 if self.seen[0][0] > 5 else x)


@trap("refused", is_on=lambda: False)
def toggled(self: Any, x: Tensor) -> Tensor:
    self.is_on = not self.is_on
    return self.run(x * 2 if self.is_on else x)


@trap("refused", is_first=lambda: True)
def first_call_alone(self: Any, x: Tensor) -> Tensor:
    x = x * 2 if self.is_first else x
    self.is_first = False
    return self.run(x)


@trap(turn=lambda: 0)
def every_fourth_call(self: Any, x: Tensor) -> Tensor:
    vars(self)["turn"] = (self.turn + 1) % 4
    return self.run(x * 2 if self.turn == 3 else x)


@trap("refused", first=lambda: collections.ChainMap({}))
def first_sum_in_a_chain(self: Any, x: Tensor) -> Tensor:
    self.first.setdefault("mean", x.detach().mean())
    return self.run(x + self.first["mean"])


# ------------------------------------------------------------ what code reads of layers that stay whole


@trap(drop=lambda: nn.Dropout(0.1), later=lambda m: setattr(m.drop, "p", 0.9))
def rate_of_a_layer_changed_later(self: Any, x: Tensor) -> Tensor:
    return self.run(F.dropout(x, self.drop.p, self.training) + self.drop(x))


@trap(norm=lambda: nn.LayerNorm(WIDTH), later=lambda m: setattr(m.norm, "eps", 0.5))
def eps_of_a_layer_changed_later(self: Any, x: Tensor) -> Tensor:
    return self.run(F.layer_norm(self.norm(x), (WIDTH,), eps=self.norm.eps))


@trap(other=linear, later=lambda m: m.other.eval())
def mode_of_a_layer_changed_later(self: Any, x: Tensor) -> Tensor:
    return self.run(self.other(x) * (2 if self.other.training else 1))


def _halve(model: Any) -> None:
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()}, assign=True)


@trap("safe", other=linear, later=_halve)
def weights_assigned_later(self: Any, x: Tensor) -> Tensor:
    return self.run(F.linear(self.other(x), self.other.weight.t()))


class Ticking(nn.Module):
    """A leaf that counts for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


@trap("refused", tick=Ticking)
def counter_of_a_layer_read_outside(self: Any, x: Tensor) -> Tensor:
    x = self.tick(x)
    return self.run(x * 2 if self.tick.calls > 5 else x)


# ------------------------------------------------------------ weights that forwards make


@trap("refused")
def layer_made_at_the_first_call(self: Any, x: Tensor) -> Tensor:
    if not hasattr(self, "project"):
        self.project = nn.Linear(x.size(-1), WIDTH)
    return self.run(self.project(x))


@trap("refused", gain=lambda: nn.Parameter(torch.ones(WIDTH)))
def parameter_replaced_by_each_call(self: Any, x: Tensor) -> Tensor:
    self.gain = nn.Parameter(self.gain.detach() * 0.9)
    return self.run(x * self.gain)


class Late(nn.Module):
    """Makes its weight from the first data."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "weight"):
            self.weight = nn.Parameter(torch.ones(x.size(-1)))
        return x * self.weight


@trap("refused", late=Late)
def weight_made_in_a_layer(self: Any, x: Tensor) -> Tensor:
    return self.run(self.late(x))


# ------------------------------------------------------------ memories that do no harm


def _memoised(function: Any) -> Any:
    """A decorator of one's own, with its memory in a closure."""
    memory: dict[Any, Any] = {}

    @functools.wraps(function)
    def memoised(*key: Any) -> Any:
        if key not in memory:
            memory[key] = function(*key)
        return memory[key]

    return memoised


@_memoised
def _steps(n: int) -> Tensor:
    return torch.arange(n).float()[:, None] / 9


@trap("safe")
def memory_of_ones_own(self: Any, x: Tensor) -> Tensor:
    return self.run(x + _steps(x.size(1)))


@trap("safe")
class MethodBehindACache(Net):
    """With a cached method."""

    @functools.cache  # noqa: B019
    def steps(self, n: int) -> Tensor:
        return torch.arange(n).float()[:, None] / 9

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x + self.steps(x.size(1)))


@trap("safe", steps=lambda: functools.lru_cache(lambda n: torch.arange(n).float()[:, None] / 9))
def cache_held_by_the_model(self: Any, x: Tensor) -> Tensor:
    return self.run(x + self.steps(x.size(1)))


class Membrane(nn.Module):
    """Puts another tensor in the place of its buffer at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.register_buffer("level", torch.zeros(0))

    def forward(self, x: Tensor, level: Tensor | None = None) -> Tensor:
        if level is not None:
            self.level = level
        if self.level.shape != x.shape:
            self.level = torch.zeros_like(x)
        self.level = 0.5 * self.level + self.layer(x)
        return torch.tanh(self.level)


@trap(membrane=Membrane)
def buffer_that_a_layer_replaces(self: Any, x: Tensor) -> Tensor:
    return self.run(self.membrane(x, torch.zeros_like(self.membrane.level)))


def _rest(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Membrane):
            module.level = torch.zeros_like(module.level)
            module.level.detach_()


@trap(membrane=Membrane)
def buffer_of_a_layer_set_outside(self: Any, x: Tensor) -> Tensor:
    _rest(self)
    return self.run(self.membrane(self.membrane(x)))


class Kinds(nn.Module):
    """Gives a tuple, a piece of which its method keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = linear(), nn.Parameter(torch.ones(WIDTH))
        self.state: Any = None

    def begin(self, state: Tensor | None) -> None:
        self.state = (self.bias if state is None else state,)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x) * self.state[0]
        return y, y.mean(-1, keepdim=True)


@trap(kinds=Kinds)
def piece_of_a_result_handed_to_a_method(self: Any, x: Tensor) -> Tensor:
    state = None
    for _ in range(2):
        self.kinds.begin(state)
        x, state = self.kinds(x)
    return self.run(x)
