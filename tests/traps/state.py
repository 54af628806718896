"""What forward remembers from call to call, and what is changed about a model after it was captured."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import enum
import functools
import io
import itertools
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .hooks import Encoder
from .registry import WIDTH, Net, trap

COUNT = 0
FACTOR = 2.0
SETTINGS = {"scale": 2.0}
LEVEL: contextvars.ContextVar[float] = contextvars.ContextVar("LEVEL", default=1.0)


class Kind(enum.Enum):
    """How to act."""

    TANH = 1
    SINE = 2


@dataclasses.dataclass
class Config:
    """Settings in an object of their own."""

    scale: float = 1.0
    calls: int = 0
    kind: Kind = Kind.TANH
    inner: Any = None


@trap(calls=lambda: 0)
def counter(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return self.run(x * self.calls)


@trap(calls=lambda: 0)
def counter_with_threshold(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return self.run(x * 2 if self.calls > 5 else x)


@trap(config=Config)
def counter_in_an_object(self: Any, x: Tensor) -> Tensor:
    self.config.calls += 1
    return self.run(x * 2 if self.config.calls > 5 else x)


@trap(calls=lambda: [0])
def counter_in_a_list(self: Any, x: Tensor) -> Tensor:
    self.calls[0] += 1
    return self.run(x * 2 if self.calls[0] > 5 else x)


@trap("refused", seen=lambda: collections.Counter())
def counter_of_sizes(self: Any, x: Tensor) -> Tensor:
    self.seen[int(x.size(1))] += 1
    return self.run(x * 2 if self.seen.total() > 5 else x)


@trap("refused", history=lambda: collections.deque(maxlen=3))
def history_of_means(self: Any, x: Tensor) -> Tensor:
    self.history.append(x.detach().mean())
    return self.run(x + sum(self.history))


@trap("refused")
class CounterOfTheClass(Net):
    """Counts on the class."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return self.run(x * 2 if type(self).calls > 5 else x)


class Counts(Net):
    """Has a number that others count on from."""

    total = 0


@trap("refused")
class CounterOfTheClassAbove(Counts):
    """Counts on its own class from what the one above holds."""

    def forward(self, x: Tensor) -> Tensor:
        type(self).total += 1
        return self.run(x * 2 if type(self).total > 5 else x)


@trap("refused")
class CounterThatTheClassHasNot(Net):
    """Counts on its class, which holds none at first."""

    def forward(self, x: Tensor) -> Tensor:
        setattr(type(self), "times", getattr(type(self), "times", 0) + 1)  # noqa: B010
        return self.run(x * 2 if type(self).times > 5 else x)  # type: ignore[attr-defined]


@trap("refused")
def counter_of_the_file(self: Any, x: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return self.run(x * 2 if COUNT > 5 else x)


def _counting() -> Any:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


@trap("refused", count=_counting)
def counter_in_a_closure(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if self.count() > 5 else x)


@trap("refused", count=itertools.count)
def counter_of_itertools(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if next(self.count) > 5 else x)


@trap("refused", turns=lambda: (i for i in itertools.cycle([1.0, 2.0, 3.0])))
def generator_of_numbers(self: Any, x: Tensor) -> Tensor:
    return self.run(x * next(self.turns))


@trap("refused", turns=lambda: itertools.cycle([1.0, 1.0, 1.0, 1.0, 2.0]))
def cycle_of_numbers(self: Any, x: Tensor) -> Tensor:
    return self.run(x * next(self.turns))


@trap("refused", log=io.StringIO)
def length_of_a_log_in_memory(self: Any, x: Tensor) -> Tensor:
    self.log.write(".")
    return self.run(x * 2 if len(self.log.getvalue()) > 5 else x)


@trap("refused", log=lambda: io.BytesIO(bytes(range(64))))
def place_in_a_stream(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if self.log.read(1)[0] > 5 else x)


@trap(log=io.StringIO)
def text_written_before_it_is_read(self: Any, x: Tensor) -> Tensor:
    self.log.seek(0)
    self.log.truncate()
    print("tanh", end="", file=self.log)
    return self.run(getattr(torch, self.log.getvalue())(x))


@trap("refused", last=lambda: None)
def last_hidden(self: Any, x: Tensor) -> Tensor:
    x = x if self.last is None else x + self.last
    self.last = x.detach().mean()
    return self.run(x)


@trap(last=lambda: None)
def written_and_never_read(self: Any, x: Tensor) -> Tensor:
    out = self.run(x)
    self.last = out.detach()
    return out


class Measured(nn.Linear):
    """A leaf that measures what it gives while it trains."""

    spread: Any = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.training:
            self.spread = x.detach().std()
        return x


class Measuring(nn.Linear):
    """A leaf that measures what it gives."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.spread, self.gain = torch.ones(()), 2.0

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.spread = x.std()
        return x


@trap("refused", part=lambda: Measured(WIDTH, WIDTH), later=lambda m: m.eval())
def measured_in_training_and_read_in_evaluation(self: Any, x: Tensor) -> Tensor:
    return self.run(self.part(x)) * self.part.spread


@trap(part=lambda: Measured(WIDTH, WIDTH), later=lambda m: m.eval())
def measured_and_read_in_training(self: Any, x: Tensor) -> Tensor:
    y = self.run(self.part(x))
    return y * self.part.spread if self.training else y


@trap(part=lambda: Measuring(WIDTH, WIDTH))
def measured_and_read_among_all_that_a_layer_has(self: Any, x: Tensor) -> Tensor:
    return self.run(self.part(x)) * vars(self.part)["spread"]


@trap(part=lambda: Measuring(WIDTH, WIDTH))
def measured_and_read_in_a_layers_dict(self: Any, x: Tensor) -> Tensor:
    return self.run(self.part(x)) * self.part.__dict__["spread"]


@trap(part=lambda: Measuring(WIDTH, WIDTH))
def measured_and_asked_for_in_a_layers_dict(self: Any, x: Tensor) -> Tensor:
    return self.run(self.part(x)) * self.part.__dict__.get("spread", 1.0)


@trap("safe", part=lambda: Measuring(WIDTH, WIDTH))
def measured_the_last_time_and_read_before(self: Any, x: Tensor) -> Tensor:
    last = vars(self.part)["spread"]
    return self.run(self.part(x)) * last


@trap(part=lambda: Measuring(WIDTH, WIDTH))
def measured_and_added_up_over_layers(self: Any, x: Tensor) -> Tensor:
    y = self.run(self.part(x))
    return y * sum(v for m in self.modules() for k, v in vars(m).items() if k == "spread")


@trap("safe", part=lambda: Measuring(WIDTH, WIDTH), later=lambda m: setattr(m.part, "gain", 3.0))
def number_in_a_layers_dict_changed_later(self: Any, x: Tensor) -> Tensor:
    return self.run(self.part(x)) * vars(self.part)["gain"]


@trap("refused", means=list, later=lambda m: m.eval())
def listed_in_training_and_read_in_evaluation(self: Any, x: Tensor) -> Tensor:
    y = self.run(x)
    if self.training:
        self.means[:] = [y.detach().mean()]
    return y + sum(self.means)


@trap(offset=lambda: 0.0, later=lambda m: m.eval())
def set_by_the_mode_in_each_call(self: Any, x: Tensor) -> Tensor:
    self.offset = 1.0 if self.training else 2.0
    return self.run(x) + self.offset


class Ticking(nn.Module):
    """A leaf that counts for itself."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2 if self.calls > 5 else x


@trap(tick=Ticking)
def counter_in_a_leaf(self: Any, x: Tensor) -> Tensor:
    return self.run(self.tick(x))


@trap(scale=lambda: 1.0, later=lambda m: setattr(m, "scale", 3.0))
def number_changed_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x * self.scale)


@trap(flag=lambda: False, later=lambda m: setattr(m, "flag", True))
def flag_changed_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x.sin() if self.flag else x)


@trap(config=Config, later=lambda m: setattr(m.config, "scale", 3.0))
def config_changed_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x * self.config.scale)


@trap(
    config=lambda: Config(inner=types.SimpleNamespace(scale=[1.0, 2.0])),
    later=lambda m: m.config.inner.scale.__setitem__(1, 5.0),
)
def deep_config_changed_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x * self.config.inner.scale[1])


@trap(config=Config, later=lambda m: setattr(m.config, "kind", Kind.SINE))
def enum_changed_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x.tanh() if self.config.kind is Kind.TANH else x.sin())


@trap(table=lambda: {"scale": 1.0}, later=lambda m: m.table.update(scale=4.0))
def entry_changed_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x * self.table["scale"])


@trap(function=lambda: torch.tanh, later=lambda m: setattr(m, "function", torch.sin))
def function_changed_later(self: Any, x: Tensor) -> Tensor:
    return self.run(self.function(x))


@trap(note=lambda: "", later=lambda m: setattr(m, "note", "epoch 3"))
def unread_attribute_changed_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x)


@trap(later=lambda m: SETTINGS.update(scale=SETTINGS["scale"] + 1))
def setting_of_the_file_changed_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x * SETTINGS["scale"])


@trap(later=lambda m: globals().update(FACTOR=FACTOR + 1))
def number_of_the_file_changed_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x * FACTOR)


@trap("safe")
class PropertyChangedLater(Net):
    """Reads through a property."""

    _scale = 1.0

    @property
    def scale(self) -> float:
        return self._scale * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x * self.scale)


def _frozen(model: Any) -> None:
    model.encoder.eval()


@trap("safe", encoder=Encoder, prepare=lambda m: m.train() and m.encoder.eval())
def frozen_part(self: Any, x: Tensor) -> Tensor:
    return self.run(F.dropout(self.encoder(x), 0.5, self.encoder.training))


class Switching(Encoder):
    """An opened part that does quite other things in training."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = super().forward(x, scale)
        return x + torch.randn_like(x).cumsum(1) if self.training else x


@trap(encoder=Switching, later=_frozen)
def part_frozen_later(self: Any, x: Tensor) -> Tensor:
    return self.run(self.encoder(x))


@trap(encoder=Encoder, later=_frozen)
def part_with_dropout_frozen_later(self: Any, x: Tensor) -> Tensor:
    return self.run(F.dropout(self.encoder(x), 0.5, self.encoder.training))


@trap(later=lambda m: m.half() and m.float() and m.double(), around=lambda: torch.autocast("cpu"))
def other_dtype_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x.to(self.layers[0].weight.dtype))


@trap(around=lambda: torch.autocast("cpu", torch.bfloat16))
def literal_under_autocast_later(self: Any, x: Tensor) -> Tensor:
    y = self.layers[0](x)
    return self.run(y * torch.ones(WIDTH, dtype=y.dtype) + x.to(y.dtype))


@trap(around=lambda: torch.autocast("cpu", torch.bfloat16))
def mask_under_autocast_later(self: Any, x: Tensor) -> Tensor:
    y = self.layers[0](x)
    mask = torch.zeros(x.size(1), x.size(1), dtype=y.dtype).fill_(torch.finfo(y.dtype).min).triu(1)
    return self.run(F.scaled_dot_product_attention(y, y, y, attn_mask=mask))


@trap(around=lambda: torch.autocast("cpu", torch.bfloat16))
def plain_under_autocast_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x) + self.layers[0](x)


@trap()
def autocast_inside(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = self.layers[0](x)
    return self.run(y.float())


@trap(around=lambda: torch.autocast("cpu", torch.bfloat16))
def autocast_off_inside(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        y = self.layers[0](x)
    return self.run(y)


@trap("safe", later=lambda m: setattr(m.layers, "0", nn.Linear(WIDTH, WIDTH).apply(_ones)))
def layer_replaced_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x)


def _ones(module: nn.Module) -> None:
    for p in module.parameters():
        nn.init.constant_(p, 0.1)


@trap(later=lambda m: setattr(m.layers[0], "weight", nn.Parameter(torch.ones(WIDTH, WIDTH))))
def weight_replaced_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x)


@trap(
    "safe",
    token=lambda: nn.Parameter(torch.zeros(WIDTH)),
    later=lambda m: setattr(m, "token", nn.Parameter(torch.ones(WIDTH))),
)
def own_parameter_replaced_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x + self.token)


@trap(
    "safe",
    prepare=lambda m: m.register_buffer("table", torch.zeros(WIDTH)),
    later=lambda m: setattr(m, "table", torch.ones(WIDTH)),
)
def own_buffer_replaced_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x + self.table)


@trap(table=lambda: torch.zeros(WIDTH), later=lambda m: setattr(m, "table", torch.ones(WIDTH)))
def plain_tensor_replaced_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x + self.table)


@trap(later=lambda m: m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()}))
def weights_loaded_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x)


@trap(lazy=lambda: nn.LazyLinear(WIDTH), prepare=lambda m: m.lazy(torch.zeros(1, WIDTH)))
def lazy_layer_once_run(self: Any, x: Tensor) -> Tensor:
    return self.run(self.lazy(x))


@trap("refused", lazy=lambda: nn.LazyLinear(WIDTH))
def lazy_layer(self: Any, x: Tensor) -> Tensor:
    return self.run(self.lazy(x))


@trap("safe", drop=lambda: nn.Dropout(0.5))
def leaf_attribute_set(self: Any, x: Tensor) -> Tensor:
    self.drop.p = 0.1 if x.size(1) > 3 else 0.9
    return self.run(self.drop(x))


@trap("safe")
def mode_toggled_inside(self: Any, x: Tensor) -> Tensor:
    was = self.training
    self.eval()
    y = F.dropout(x, 0.5, self.training)
    self.train(was)
    return self.run(y)


@trap("safe")
def context_variable(self: Any, x: Tensor) -> Tensor:
    return self.run(x * LEVEL.get())


class Cached(Net):
    """Keeps a number on itself the first time."""

    @functools.cached_property
    def width(self) -> int:
        return self.layers[0].weight.size(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x * self.width)


trap()(Cached)


@trap()
class TrainsOnly(Net):
    """Loops over a size and asks for integer roots in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for i in range(x.size(1)):
                x = torch.cat([x[:, :i] * 1.1, x[:, i:]], 1)
        return self.run(x)


def _averaged(model: Any) -> None:
    model.register_buffer("mean", torch.linspace(-1, 1, WIDTH))


@trap(prepare=_averaged)
def buffer_replaced_by_an_average(self: Any, x: Tensor) -> Tensor:
    self.mean = 0.9 * self.mean + 0.1 * x.detach().flatten(0, -2).mean(0)
    return self.run(x - self.mean)


@trap(prepare=_averaged)
def buffer_replaced_in_training_once_it_was_used(self: Any, x: Tensor) -> Tensor:
    y = self.run(self.layers[0](x) * self.mean)
    if self.training:
        with torch.no_grad():
            self.mean = self.mean * 0.5 + y.mean() * 0.5
    return y


@trap(prepare=_averaged)
def buffer_replaced_twice_and_used_as_it_was(self: Any, x: Tensor) -> Any:
    before, row = self.mean, self.mean[None]
    self.mean = self.mean.roll(1)
    self.mean = torch.where(self.mean > 0, self.mean, -self.mean)
    return self.run(x * row), before * 2, self.mean


@trap(prepare=_averaged)
def buffer_written_to_and_replaced(self: Any, x: Tensor) -> Tensor:
    self.mean[0] = 0.5
    y = self.run(x * self.mean.clone())
    self.mean = self.mean.flip(0)
    return y


class Centred(nn.Module):
    """Layers behind a centre that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("centre", torch.zeros(1, WIDTH))
        self.register_buffer("n_calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(torch.tanh(self.first(x - self.centre)))
        self.centre = self.centre * 0.9 + y.detach().flatten(0, -2).mean(0, keepdim=True) * 0.1
        self.n_calls = self.n_calls + 1
        return y


def _calls_itself(model: Any) -> None:
    for training in (True, False, True):
        model.train(training)(torch.randn(3, 6, WIDTH, generator=torch.Generator().manual_seed(5)))
    model.eval()


@trap(part=Centred, later=_calls_itself)
def model_called_itself_once_its_buffers_are_replaced(self: Any, x: Tensor) -> Tensor:
    return self.run(self.part(x) * self.part.centre + self.part.n_calls)


@trap("refused", prepare=_averaged, later=lambda m: m.register_buffer("mean", torch.ones(1)))
def replaced_buffer_replaced_by_another_size(self: Any, x: Tensor) -> Tensor:
    self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
    return self.run(x - self.mean)


@trap(part=Centred)
def part_whose_buffers_are_replaced(self: Any, x: Tensor) -> Tensor:
    return self.run(self.part(x) * self.part.centre + self.part.n_calls)
