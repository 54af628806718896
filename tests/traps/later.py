"""What comes to a model after its capture: attributes, hooks on all modules, gradients, other state."""

from __future__ import annotations

import collections
import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all

from .registry import WIDTH, Net, sequences, trap

CLOCK = types.SimpleNamespace(step=0, rate=1.0)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Gained(nn.Linear):
    """A leaf whose forward looks for an attribute that it is not made with."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self, "gain", 1.0)

    def level(self) -> float:
        """Asked for by the code around."""
        try:
            return float(self.gain)
        except AttributeError:
            return 1.0


class Box:
    """An object that may come to hold a number."""

    __slots__ = ("gain",)


def gained() -> Gained:
    return Gained(WIDTH, WIDTH)


def _gain(place: str) -> Any:
    """What gives the module, or the object, at a place of the model a gain."""

    def give(model: Any) -> None:
        held = model
        for name in filter(None, place.split(".")):
            held = getattr(held, name)
        held.gain = 3.0

    return give


# ------------------------------------------------------------ attributes that come later


@trap(later=_gain(""))
def attribute_that_comes(self: Any, x: Tensor) -> Tensor:
    return self.run(x * getattr(self, "gain", 1.0))


@trap(later=_gain(""))
def attribute_that_is_tried(self: Any, x: Tensor) -> Tensor:
    try:
        return self.run(x * self.gain)
    except AttributeError:
        return self.run(x)


@trap(later=_gain("layers.0"))
def attribute_of_a_leaf_that_comes(self: Any, x: Tensor) -> Tensor:
    return self.run(x * getattr(self.layers[0], "gain", 1.0))


@trap(later=_gain("layers.1"))
def attribute_of_a_leaf_that_is_asked_for(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if hasattr(self.layers[1], "gain") else x)


@trap(later=_gain("layers.2"))
def attribute_of_a_leaf_that_is_tried(self: Any, x: Tensor) -> Tensor:
    try:
        return self.run(x * self.layers[2].gain)
    except AttributeError:
        return self.run(x)


@trap(more=gained, later=_gain("more"))
def attribute_that_a_leaf_asks_for(self: Any, x: Tensor) -> Tensor:
    return self.run(self.more(x))


@trap(more=gained, later=_gain("more"))
def attribute_that_a_method_asks_for(self: Any, x: Tensor) -> Tensor:
    return self.run(x * self.more.level())


@trap(later=_gain("layers"))
def attribute_of_a_list_of_layers(self: Any, x: Tensor) -> Tensor:
    return self.run(x * getattr(self.layers, "gain", 1.0))


@trap(settings=types.SimpleNamespace, later=_gain("settings"))
def attribute_of_settings_that_comes(self: Any, x: Tensor) -> Tensor:
    return self.run(x * getattr(self.settings, "gain", 1.0))


@trap(box=Box, later=_gain("box"))
def slot_that_is_filled(self: Any, x: Tensor) -> Tensor:
    return self.run(x * getattr(self.box, "gain", 1.0))


@trap(options=dict, later=lambda m: m.options.update(gain=3.0))
def key_that_comes(self: Any, x: Tensor) -> Tensor:
    return self.run(x * self.options.get("gain", 1.0))


@trap(later=lambda m: setattr(m, "gain", 3.0))
def attribute_looked_up_in_the_dict(self: Any, x: Tensor) -> Tensor:
    return self.run(x * vars(self).get("gain", 1.0))


@trap(later=lambda m: setattr(type(m), "gain", 3.0))
class AttributeOfTheClassThatComes(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(x * getattr(self, "gain", 1.0))


@trap("safe", later=lambda m: m.register_buffer("gain", torch.full((WIDTH,), 3.0)))
def buffer_that_comes(self: Any, x: Tensor) -> Tensor:
    gain = getattr(self, "gain", None)
    return self.run(x if gain is None else x * gain)


@trap("safe", later=lambda m: m.layers[0].register_buffer("gain", torch.full((WIDTH,), 3.0)))
def buffer_of_a_leaf_that_comes(self: Any, x: Tensor) -> Tensor:
    gain = getattr(self.layers[0], "gain", None)
    return self.run(x if gain is None else x * gain)


@trap("safe", later=lambda m: m.add_module("adapter", nn.Tanh()))
def layer_that_comes(self: Any, x: Tensor) -> Tensor:
    return self.run(self.adapter(x) if hasattr(self, "adapter") else x)


@trap(later=lambda m: setattr(m, "run", lambda x: x * 2))
def method_that_is_replaced(self: Any, x: Tensor) -> Tensor:
    return self.run(x)


@trap(later=lambda m: setattr(m.layers[0], "forward", lambda x: x * 2))
def forward_of_a_leaf_that_is_replaced(self: Any, x: Tensor) -> Tensor:
    return self.run(x)


@trap(gain=lambda: 3.0, later=lambda m: delattr(m, "gain"))
def attribute_that_goes(self: Any, x: Tensor) -> Tensor:
    return self.run(x * getattr(self, "gain", 1.0))


def _lose_gain(model: Any) -> None:
    del model.layers[0].gain


@trap(prepare=_gain("layers.0"), later=_lose_gain)
def attribute_of_a_leaf_that_goes(self: Any, x: Tensor) -> Tensor:
    return self.run(x * getattr(self.layers[0], "gain", 1.0))


# ------------------------------------------------------------ hooks on all modules


@contextlib.contextmanager
def doubling() -> Iterator[None]:
    """A hook on all modules that doubles what linear layers give."""
    is_meant = nn.Linear
    handle = of_all.register_module_forward_hook(lambda m, a, r: r * 2 if isinstance(m, is_meant) else None)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def doubling_all() -> Iterator[None]:
    """One that doubles what all modules are given."""
    handle = of_all.register_module_forward_pre_hook(lambda m, a: tuple(2 * t for t in a))
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def doubling_in_place() -> Iterator[None]:
    """One that doubles what linear layers give where it is."""

    def double(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if isinstance(module, nn.Linear):
            output.mul_(2)

    handle = of_all.register_module_forward_hook(double)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def halving_gradients() -> Iterator[None]:
    """One that halves the gradients of what modules are given."""

    def halve(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return tuple(None if g is None else g / 2 for g in inputs)

    handle = of_all.register_module_full_backward_hook(halve)
    try:
        yield
    finally:
        handle.remove()


@trap("safe", within=doubling, around=doubling)
def hook_on_all_modules(self: Any, x: Tensor) -> Tensor:
    return self.run(x)


@trap("safe", around=doubling)
def hook_on_all_modules_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x)


@trap("safe", around=doubling_all)
def hook_before_all_modules_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x)


@trap("safe", around=doubling_in_place)
def hook_on_all_modules_that_writes(self: Any, x: Tensor) -> Tensor:
    return self.run(x)


@trap("safe", around=halving_gradients)
def backward_hook_on_all_modules_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x)


# ------------------------------------------------------------ one and the same


def sometimes_one(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """Two tensors of one shape; in every second call they are one."""
    (x,) = sequences(batch, length, seed)
    return (x, x) if seed % 2 else (x, x.flip(0))


@trap("safe", inputs=sometimes_one)
def whether_two_are_one(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return self.run(x * 2 if x is y else x + y)


@trap("safe", inputs=sometimes_one)
def whether_two_are_not_one(self: Any, x: Tensor, y: Tensor) -> Tensor:
    if x is not y:
        x = x + y.sin()
    return self.run(x)


@trap("safe", inputs=sometimes_one)
def whether_their_ids_are_one(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return self.run(x * 2 if id(x) == id(y) else x + y)


@trap("safe", inputs=sometimes_one)
def whether_one_is_among_others(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return self.run(x * 2 if any(x is t for t in (y, None)) else x + y)


class Attends(nn.Module):
    """A leaf that takes another way for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return self.layer(query if query is key else query - key)


@trap("safe", inputs=sometimes_one, more=Attends)
def whether_a_leaf_is_given_one(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return self.run(self.more(x, y))


@trap(inputs=sometimes_one, more=lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True))
def attention_to_one_or_another(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return self.run(self.more(x, y, y)[0])


@trap("safe", inputs=sometimes_one, last=lambda: None)
def whether_it_is_the_last_one(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return self.run(x * 2 if x is self.last else x + y)


# ------------------------------------------------------------ gradients


@trap("refused")
def gradient_of_a_weight_asked(self: Any, x: Tensor) -> Tensor:
    return self.run(x if self.layers[0].weight.grad is None else x * 2)


@trap("refused")
def gradient_of_the_input_asked(self: Any, x: Tensor) -> Tensor:
    return self.run(x if x.grad is None else x * 2)


@trap("refused")
def gradients_of_all_weights_asked(self: Any, x: Tensor) -> Tensor:
    known = [p.grad for p in self.parameters() if p.grad is not None]
    return self.run(x + len(known))


# ------------------------------------------------------------ state that is other at each call


def ticking(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """A loop that counts its steps where the model can see them."""
    CLOCK.step += seed > 0
    return sequences(batch, length, seed)


@trap("safe", inputs=ticking, clock=lambda: CLOCK)
def step_of_the_loop(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if self.clock.step > 10_000 else x)


@trap("safe", inputs=ticking, clock=lambda: CLOCK)
def step_of_the_loop_in_the_data(self: Any, x: Tensor) -> Tensor:
    return self.run(x * (self.clock.step % 3))


@trap("safe", inputs=ticking)
def step_of_the_file(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if CLOCK.step > 10_000 else x)


@trap("safe", calls=lambda: 0)
def counter_that_is_only_told(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return self.run(x)


@trap("safe", mean=lambda: None)
def mean_kept_for_others(self: Any, x: Tensor) -> Tensor:
    mean = x.detach().mean()
    self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
    return self.run(x)


@trap("safe", losses=list)
def losses_gathered(self: Any, x: Tensor) -> Tensor:
    y = self.run(x)
    self.losses.append(float(y.detach().mean()))
    return y


# ------------------------------------------------------------ what no line of a graph shows


class Applied(nn.Linear):
    """A leaf that is given a function, or settings, beside its input."""

    def forward(self, x: Tensor, how: Any) -> Tensor:
        x = super().forward(x)
        return how(x) if callable(how) else x * how.rate


def applied() -> Applied:
    return Applied(WIDTH, WIDTH)


@trap(part=applied, function=lambda: torch.tanh, later=lambda m: setattr(m, "function", torch.relu))
def function_given_to_a_layer(self: Any, x: Tensor) -> Tensor:
    return self.run(self.part(x, self.function))


def settings(rate: float) -> Any:
    return types.SimpleNamespace(rate=rate)


@trap(part=applied, how=lambda: settings(1.0), later=lambda m: setattr(m, "how", settings(3.0)))
def settings_given_to_a_layer(self: Any, x: Tensor) -> Tensor:
    return self.run(self.part(x, self.how))


@trap(part=applied, how=lambda: settings(2.0), later=lambda m: setattr(m, "how", settings(2.0)))
def equal_settings_given_to_a_layer(self: Any, x: Tensor) -> Tensor:
    return self.run(self.part(x, self.how))


@trap(key=lambda: "first", later=lambda m: setattr(m, "key", "second"))
def key_of_what_is_returned(self: Any, x: Tensor) -> Any:
    return {self.key: self.run(x)}


class Picked(nn.Linear):
    """A leaf that goes by what a mapping holds."""

    def forward(self, given: Any) -> Tensor:
        return super().forward(given["first"]) if "first" in given else super().forward(given["second"]) * 3


@trap(
    part=lambda: Picked(WIDTH, WIDTH),
    key=lambda: "first",
    later=lambda m: setattr(m, "key", "second"),
)
def key_of_what_is_given_to_a_layer(self: Any, x: Tensor) -> Tensor:
    return self.run(self.part(collections.UserDict({self.key: x})))


class Paired(nn.Linear):
    """A leaf that gives two tensors in a structure that can be set."""

    how = "pair"

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        given = {"pair": (y, x), "single": (y,), "bare": y, "named": {"y": y, "x": x}, "alone": {"y": y}}
        given |= {"deep": {"a": (y, None), "b": [x, 2]}, "deeper": {"a": (y, None), "b": [x, 2, x]}}
        return given[self.how]


def paired(how: str = "pair") -> Paired:
    made = Paired(WIDTH, WIDTH)
    made.how = how
    return made


@trap("refused", part=paired, later=lambda m: setattr(m.part, "how", "single"))
def pair_of_a_layer_that_gives_one_later(self: Any, x: Tensor) -> Tensor:
    given = self.part(x)
    return self.run(given[0]) + given[-1]


@trap("refused", part=paired, later=lambda m: setattr(m.part, "how", "bare"))
def pair_that_is_returned_as_a_layer_gives_it(self: Any, x: Tensor) -> Any:
    return self.part(self.run(x))


@trap("refused", part=lambda: paired("named"), later=lambda m: setattr(m.part, "how", "alone"))
def key_that_a_layer_does_not_give_later(self: Any, x: Tensor) -> Tensor:
    given = self.part(x)
    return self.run(given["y"]) + given.get("x", x)


@trap(part=lambda: paired("single"), later=lambda m: setattr(m.part, "how", "pair"))
def layer_that_gives_more_later(self: Any, x: Tensor) -> Tensor:
    return self.run(self.part(x)[0])


@trap("refused", part=lambda: paired("single"), later=lambda m: setattr(m.part, "how", "pair"))
def more_of_a_layer_that_is_summed(self: Any, x: Tensor) -> Tensor:
    return self.run(sum(self.part(x)))  # type: ignore[arg-type]


@trap("refused", part=lambda: paired("single"), later=lambda m: setattr(m.part, "how", "pair"))
def more_of_a_layer_that_is_returned(self: Any, x: Tensor) -> Any:
    return self.part(self.run(x))


@trap("refused", part=lambda: paired("alone"), later=lambda m: setattr(m.part, "how", "named"))
def more_keys_of_a_layer_that_is_gone_through(self: Any, x: Tensor) -> Any:
    given = self.part(x)
    return self.run(torch.stack([given[key] for key in given]).sum(0))


@trap(part=lambda: paired("deep"))
def number_deep_in_what_a_layer_gives(self: Any, x: Tensor) -> Tensor:
    given = self.part(x)
    return self.run(given["a"][0] + given["b"][0]) * given["b"][1]


@trap(part=lambda: paired("deep"), later=lambda m: setattr(m.part, "how", "deeper"))
def more_deep_in_what_a_layer_gives(self: Any, x: Tensor) -> Tensor:
    given = self.part(x)
    return self.run(given["a"][0] + given["b"][0]) * given["b"][1]
