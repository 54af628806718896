"""Containers, wrappers, compiled code and unusual ways to call a layer."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import WIDTH, Net, trap


@dataclasses.dataclass
class Box:
    """A mutable object handed from layer to layer."""

    x: Tensor
    log: list[Any] = dataclasses.field(default_factory=list)


class Fills(nn.Module):
    """A leaf that writes into the container it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any) -> None:
        if isinstance(given, dict):
            given["y"] = self.layer(given["x"])
        elif isinstance(given, list):
            given.append(self.layer(given[0]))
        else:
            given.x = self.layer(given.x)


@trap("safe", fill=Fills)
def leaf_fills_a_dict(self: Any, x: Tensor) -> Tensor:
    given = {"x": x}
    self.fill(given)
    return self.run(given["y"])


@trap("safe", fill=Fills)
def leaf_fills_a_list(self: Any, x: Tensor) -> Tensor:
    given = [x]
    self.fill(given)
    return self.run(given[-1])


@trap("safe", fill=Fills)
def leaf_fills_an_object(self: Any, x: Tensor) -> Tensor:
    box = Box(x)
    self.fill(box)
    return self.run(box.x)


@trap()
def dict_with_tuple_keys(self: Any, x: Tensor) -> Any:
    edges = {("a", "to", "b"): x, (1, 2): x * 2}
    return {k: self.run(v) for k, v in edges.items()}


class Edges(nn.Module):
    """A leaf that takes and gives a dict with tuple keys."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, edges: Any) -> Any:
        return {k: self.layer(v) for k, v in edges.items()}


@trap(edges=Edges)
def leaf_with_tuple_keys(self: Any, x: Tensor) -> Any:
    edges = self.edges({("a", "b"): x, 3: x * 2})
    return self.run(edges[("a", "b")] + edges[3])


@trap()
def ordered_and_default(self: Any, x: Tensor) -> Any:
    out: Any = collections.OrderedDict(a=self.run(x))
    more: Any = collections.defaultdict(list)
    more["k"].append(x * 2)
    return out, dict(more)


@trap()
def deque_of_states(self: Any, x: Tensor) -> Any:
    states: Any = collections.deque([x], maxlen=2)
    for layer in self.layers:
        states.append(layer(states[-1]).tanh())
    return states[0] + states[1]


@trap()
class NotCalledSelf(Net):
    """Whose forward calls its first parameter otherwise."""

    def forward(this, x: Tensor) -> Tensor:
        return this.run(x)


@trap()
class AnyArguments(Net):
    """Takes whatever comes."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.run(args[0])


@trap("safe")
class OwnCall(Net):
    """Overrides the call itself."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class Coder(nn.Module):
    """Is used by methods other than its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def encode(self, x: Tensor) -> Tensor:
        return self.a(x).tanh()

    def decode(self, x: Tensor) -> Tensor:
        return self.b(x)


@trap(coder=Coder)
def methods_of_a_leaf(self: Any, x: Tensor) -> Tensor:
    return self.run(self.coder.decode(self.coder.encode(x)))


@trap()
def forward_called_directly(self: Any, x: Tensor) -> Tensor:
    return self.run(self.layers[0].forward(x))


@trap()
def weight_used_directly(self: Any, x: Tensor) -> Tensor:
    return self.run(F.linear(x, self.layers[0].weight.detach(), self.layers[1].bias))


@trap("safe", hidden=lambda: [nn.Linear(WIDTH, WIDTH)])
def unregistered_layer(self: Any, x: Tensor) -> Tensor:
    return self.run(self.hidden[0](x))


@trap("safe")
def layer_made_in_forward(self: Any, x: Tensor) -> Tensor:
    return self.run(nn.LayerNorm(WIDTH)(x))


@trap(parallel=lambda: nn.DataParallel(nn.Linear(WIDTH, WIDTH)))
def data_parallel(self: Any, x: Tensor) -> Tensor:
    return self.run(self.parallel(x))


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    if x.size(1) > 7:
        x = x * 2
    return x.sin()


@trap("safe")
def scripted_function(self: Any, x: Tensor) -> Tensor:
    return self.run(scripted(x))


@trap(scripted=lambda: torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())))
def scripted_layer(self: Any, x: Tensor) -> Tensor:
    return self.run(self.scripted(x))


def with_statistics() -> Any:
    return torch.jit.script(nn.Sequential(nn.InstanceNorm1d(6, track_running_stats=True), nn.Tanh()))


@trap(scripted=with_statistics)
def scripted_layer_with_buffers(self: Any, x: Tensor) -> Tensor:
    return self.run(self.scripted(x[:, :6]))


@torch.compile(backend="eager", dynamic=False)
def compiled(x: Tensor) -> Tensor:
    return x.sin() * x.size(1)


@trap("safe")
def compiled_function(self: Any, x: Tensor) -> Tensor:
    return self.run(compiled(x))


@torch.compile(backend="eager", dynamic=False)
def doubled_where_large(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


@trap("safe")
def compiled_function_that_branches_on_data(self: Any, x: Tensor) -> Tensor:
    return self.run(doubled_where_large(x))


@trap(held=lambda: torch.compile(lambda x: x.sin() * 2, backend="eager", dynamic=False))
def compiled_function_that_is_held(self: Any, x: Tensor) -> Tensor:
    return self.run(self.held(self.layers[0](x)))


@trap(later=lambda m: setattr(m, "gain", 3.0))
class MethodThatIsCompiled(Net):
    gain = 2.0

    @torch.compile(backend="eager", dynamic=False)
    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers[0](x)) * self.gain if self.training else self.layers[1](x)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.inner(x))


@trap(later=lambda m: setattr(m, "gain", 3.0))
class ForwardThatIsCompiled(Net):
    gain = 2.0

    @torch.compile(backend="eager", dynamic=False)
    def forward(self, x: Tensor) -> Tensor:
        return self.run(x) * self.gain


@trap("safe", compiled=lambda: torch.compile(nn.Linear(WIDTH, WIDTH), backend="eager"))
def compiled_layer(self: Any, x: Tensor) -> Tensor:
    return self.run(self.compiled(x))


@functools.singledispatch
def dispatched(x: Any) -> Any:
    raise TypeError(x)


@dispatched.register
def _(x: torch.Tensor) -> Any:
    return x * 2


@trap()
def single_dispatch(self: Any, x: Tensor) -> Tensor:
    return self.run(dispatched(x))


@trap()
def embedding_with_a_norm(self: Any, x: Tensor) -> Tensor:
    return self.run(x + F.pad(x.mean(1, keepdim=True), (0, 0, 0, x.size(1) - 1)))


@trap(fold=lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True))
def attention_outside(self: Any, x: Tensor) -> Tensor:
    out, weights = self.fold(x, x, x)
    return self.run(out) + weights.mean()


@trap(rnn=lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True))
def recurrent(self: Any, x: Tensor) -> Tensor:
    out, (h, c) = self.rnn(x)
    return self.run(out + h[0][:, None] + c[0][:, None])


@trap()
def generator_of_layers(self: Any, x: Tensor) -> Tensor:
    return functools.reduce(lambda h, layer: layer(h).tanh(), (layer for layer in self.layers), x)


@trap("refused")
def returns_a_generator(self: Any, x: Tensor) -> Any:
    return (layer(x) for layer in self.layers)


def _dropped(layers: Any, training: bool) -> Any:
    return [layer for layer in layers if not training or torch.rand(()) > 0.5]


@trap("refused")
def helper_that_returns_layers(self: Any, x: Tensor) -> Tensor:
    for layer in _dropped(self.layers, self.training):
        x = layer(x).tanh()
    return x


class Marked(dict[str, Any]):
    """Holds something in an attribute beside its items."""

    def __init__(self, held: Any, **items: Any) -> None:
        super().__init__(**items)
        self.held, self.note = held, "beside"


class Listed(list[Any]):
    """A list with a name."""

    name: Any = None


class Named(dict[str, Any]):
    """Its items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Gives(nn.Module):
    """A leaf that gives what holds tensors in several places."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        if self.kind == "dict":
            return Marked(x.cos(), y=y)
        if self.kind == "list":
            made = Listed([y, x.cos()])
            made.name = x.sin()
            return made
        y.held = x.cos()
        return y


class Takes(nn.Module):
    """A leaf that looks at what was set on the tensor it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + getattr(x, "held", 0)


@trap()
def gives_a_dict_with_attributes(self: Any, x: Tensor) -> Any:
    return Marked(x.sin(), y=self.run(x))


@trap()
def gives_a_list_with_attributes(self: Any, x: Tensor) -> Any:
    made = Listed([self.run(x), x.cos()])
    made.name = {"inner": Marked(x * 2, z=x * 3)}
    return made


@trap()
def gives_a_dict_of_attributes(self: Any, x: Tensor) -> Any:
    return Named(y=self.run(x), z=x * 2)


@trap(gives=lambda: Gives("dict"))
def leaf_gives_a_dict_with_attributes(self: Any, x: Tensor) -> Tensor:
    given = self.gives(x)
    return self.run(given["y"]) + given.held


@trap(gives=lambda: Gives("list"))
def leaf_gives_a_list_with_attributes(self: Any, x: Tensor) -> Tensor:
    given = self.gives(x)
    return self.run(given[0]) + given[1] * given.name


@trap()
def gives_a_tensor_with_an_attribute(self: Any, x: Tensor) -> Tensor:
    y = self.run(x)
    y.held = x.cos()  # type: ignore[attr-defined]
    return y


@trap("safe", gives=lambda: Gives("tensor"), takes=Takes)
def leaf_hands_on_an_attribute_of_a_tensor(self: Any, x: Tensor) -> Tensor:
    y = self.gives(x)
    for layer in self.layers:
        x = layer(x).tanh()
    return self.takes(y) + x


@trap("safe", takes=Takes)
def leaf_reads_an_attribute_of_a_tensor(self: Any, x: Tensor) -> Tensor:
    y = self.run(x)
    y.held = x.cos()  # type: ignore[attr-defined]
    return self.takes(y)
