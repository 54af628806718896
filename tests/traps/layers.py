"""Modules that are held, called, shared, swapped and looked up in unusual ways, and functions around them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import operator
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from .registry import WIDTH, Net, buffers, trap


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


@trap()
def called_twice(self: Any, x: Tensor) -> Tensor:
    return self.run(self.layers[0](self.layers[0](x)))


@trap(other=linear, prepare=lambda m: setattr(m, "same", m.other))
def under_two_names(self: Any, x: Tensor) -> Tensor:
    return self.run(self.same(self.other(x)))


@trap(other=linear, prepare=lambda m: setattr(m.other, "weight", m.layers[3].weight))
def tied_weights(self: Any, x: Tensor) -> Tensor:
    return self.run(F.linear(self.other(x), self.layers[3].weight.t()))


class Tree(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        return self.layer(x) if depth == 0 else self(x, depth - 1) + self(x * 2, depth - 1)


@trap(tree=Tree)
def calls_itself(self: Any, x: Tensor) -> Tensor:
    return self.run(self.tree(x))


@trap("safe")
def list_of_layers_grown(self: Any, x: Tensor) -> Tensor:
    self.layers.append(self.layers[0])
    out = self.run(x)
    del self.layers[-1]
    return out


@trap()
def layers_reversed_and_cut(self: Any, x: Tensor) -> Tensor:
    for layer in itertools.chain(reversed(self.layers), self.layers[1:3], [self.layers[-1]]):
        x = layer(x).tanh()
    return x


@trap(table=lambda: nn.ModuleDict({"a": linear(), "b": linear()}))
def by_name(self: Any, x: Tensor) -> Tensor:
    for name, layer in sorted(self.table.items()):
        x = layer(x) * (2 if name == "a" else 1)
    return self.run(self.table["a"](x))


@trap(
    table=lambda: nn.ModuleDict(
        {name: linear() for name in ("²", "三", "in", "lambda", "1", "01", "٣", 'a"b', "c d")}
    ),
    scales=lambda: nn.ParameterDict({name: torch.ones(WIDTH) for name in ("from", "\n")}),
)
def parts_of_any_name(self: Any, x: Tensor) -> Tensor:
    for layer in self.table.values():
        x = layer(x).tanh()
    return self.run(x * self.scales["from"] + self.scales["\n"])


@trap(
    outputs=linear,
    index=linear,
    rank=linear,
    graph=linear,
    code=linear,
    sections=linear,
    paths=linear,
    _twin=linear,
)
def parts_named_as_a_stage_names_its_own(self: Any, x: Tensor) -> Tensor:
    x = self.code(self.graph(self.index(x).tanh()).tanh()).tanh()
    return self.run(self.outputs(self.rank(self.sections(self.paths(self._twin(x)))).tanh()))


class Holds(nn.Module):
    """Parts of such names, below the top."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("_twin", "twin", "forms", "_forms", "_plan"):
            self.add_module(name, linear())
        self.register_buffer("_device", torch.ones(WIDTH))
        self.inner = nn.ModuleDict({"_device": linear(), "paths": linear()})

    def forward(self, x: Tensor) -> Tensor:
        x = self._plan(self._forms(self.forms(self.twin(self._twin(x)).tanh()).tanh()).tanh())
        return self.inner["paths"](self.inner["_device"](x.tanh()) * self._device).tanh()


@trap(held=Holds)
def parts_named_so_further_below(self: Any, x: Tensor) -> Tensor:
    return self.run(self.held(x) + torch.arange(WIDTH, device=x.device))


@trap("refused", _device=linear)
def part_named_as_the_device(self: Any, x: Tensor) -> Tensor:
    return self.run(self._device(x) + torch.arange(WIDTH, device=self._device.weight.device))


class Blocks(nn.Module):
    """Layers in a list, whose weights are registered under the name of a method."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [linear(), linear()]
        self.parameters = nn.ParameterList([p for block in self.blocks for p in block.parameters()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x - block(x).relu()
        return x


@trap(part=Blocks)
def weights_named_as_a_method(self: Any, x: Tensor) -> Tensor:
    for block in self.part.blocks:
        x = block(x).tanh()
    return self.run(self.part(x))


@trap(stack=lambda: nn.Sequential(linear(), nn.ReLU(), linear(), nn.Tanh()))
def part_of_a_sequence(self: Any, x: Tensor) -> Tensor:
    return self.run(self.stack[2:](self.stack[:2](x)))


class Scaling(nn.Module):
    """Gives its weight through a property and a descriptor."""

    class Doubled:
        """A descriptor."""

        def __get__(self, owner: Any, cls: Any = None) -> Any:
            return owner.scale * 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))

    doubled = Doubled()

    @property
    def halved(self) -> Tensor:
        return self.scale / 2

    def forward(self, x: Tensor) -> Tensor:
        return x * self.halved + self.doubled


@trap(scaling=Scaling)
def property_and_descriptor(self: Any, x: Tensor) -> Tensor:
    return self.run(self.scaling(x) * self.scaling.halved + self.scaling.doubled)


class Wrapper(nn.Module):
    """Answers for what it wraps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


class Handing(Net):
    """Gives who asks for a layer a function that calls it, and pairs of its weights for one of these."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = linear(), nn.Sequential(linear(), nn.BatchNorm1d(WIDTH))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if isinstance(found, nn.Module):
            return lambda *given: found(*given) if given else found
        return (found, 2.0) if isinstance(found, nn.Parameter) else found


@trap()
class layers_behind_functions(Handing):
    def forward(self, x: Tensor) -> Tensor:
        gain, factor = self.gain
        x = self.block(self.first(x).flatten(0, 1)).unflatten(0, x.shape[:2]) * gain * factor
        for layer in self.layers():
            x = torch.tanh(layer(x))
        return x


@trap()
class layers_behind_properties(Net):
    """Has a property of the name under which it holds its layers."""

    @property
    def layers(self) -> list[nn.Module]:
        return [*self._modules["layers"].children()][::-1]

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


@trap(wrapped=lambda: Wrapper(linear()))
def answers_for_another(self: Any, x: Tensor) -> Tensor:
    return self.run(self.wrapped(x) + self.wrapped.weight.sum() * self.wrapped.out_features)


class Pair(NamedTuple):
    """Two results."""

    first: Any
    second: Any


@dataclasses.dataclass
class Result:
    """Results with a default."""

    hidden: Any
    rest: Any = None
    name: str = "result"


@trap()
def named_results(self: Any, x: Tensor) -> Any:
    out = self.run(x)
    return Result(out, {"pair": Pair(out * 2, [x, None]), "n": 3})


class Paired(nn.Module):
    """A leaf that gives a namedtuple, with a number in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor, *more: Tensor, scale: float = 1.0, **named: Any) -> Any:
        return Pair(self.layer(x) * scale + sum(more), Result(x, named.get("rest")))


@trap(paired=Paired)
def leaf_with_all_arguments(self: Any, x: Tensor) -> Any:
    pair = self.paired(x, x * 2, x, scale=0.5, rest=x + 1)
    first, second = pair
    return self.run(first + second.rest + pair.second.hidden)


def _steps(layers: Any, x: Tensor) -> Iterator[Tensor]:
    for layer in layers:
        x = layer(x).tanh()
        yield x


@trap()
def steps_of_a_generator(self: Any, x: Tensor) -> Tensor:
    return sum(_steps(self.layers, x))


@trap(weights=lambda: nn.ParameterList([torch.ones(WIDTH), torch.zeros(WIDTH)]))
def list_of_parameters(self: Any, x: Tensor) -> Tensor:
    for weight in self.weights:
        x = x * weight + 1
    return self.run(x)


@trap(weights=lambda: nn.ParameterDict({"a": nn.Parameter(torch.ones(WIDTH)), "b": torch.ones(WIDTH)}))
def dict_of_parameters(self: Any, x: Tensor) -> Tensor:
    return self.run(x * self.weights["a"] + self.weights.b)


@trap(maker=lambda: nn.Linear(WIDTH, WIDTH * WIDTH))
def weights_made_by_a_layer(self: Any, x: Tensor) -> Tensor:
    weight = self.maker(x.mean((0, 1))).view(WIDTH, WIDTH)
    return self.run(F.linear(x, weight))


@trap("safe", holder=lambda: types.SimpleNamespace(layer=linear()))
def layer_in_a_plain_object(self: Any, x: Tensor) -> Tensor:
    return self.run(self.holder.layer(x))


@trap("safe", act=nn.ReLU)
def layer_swapped_inside(self: Any, x: Tensor) -> Tensor:
    self.act = nn.GELU() if self.training else nn.ReLU()
    return self.run(self.act(x))


class Child(nn.Module):
    """Reads a weight of its parent."""

    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.parent = weakref.ref(parent)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.parent().token  # type: ignore[union-attr]


@trap(
    "safe",
    token=lambda: nn.Parameter(torch.full((WIDTH,), 0.5)),
    prepare=lambda m: setattr(m, "child", Child(m)),
)
def child_reads_its_parent(self: Any, x: Tensor) -> Tensor:
    return self.run(self.child(x))


def _patched(model: Any) -> None:
    layer = model.layers[0]
    forward = layer.forward
    layer.forward = lambda x: forward(x) * 3


@trap(prepare=_patched)
def forward_replaced(self: Any, x: Tensor) -> Tensor:
    return self.run(x)


class Loud(nn.Linear):
    """Overrides the call."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2


@trap(loud=lambda: Loud(WIDTH, WIDTH))
def call_of_a_leaf_overridden(self: Any, x: Tensor) -> Tensor:
    return self.run(self.loud(x))


def doubled(method: Any) -> Any:
    """A decorator."""

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs) * 2

    return wrapper


class Counts(Loud):
    """Counts its positive rows, in its forward too, where what it does hangs on how many there are."""

    def __call__(self, x: Tensor, times: int | None = None) -> Tensor:
        times = int((x.sum(-1) > 0).sum()) if times is None else times
        return super().__call__(x) * times

    def forward(self, x: Tensor) -> Tensor:
        positive = x[x.sum(-1) > 0]
        return super().forward(x) * (2 if positive.size(0) >= 2 else 3)


@trap(counts=lambda: nn.ModuleList([Counts(WIDTH, WIDTH), Loud(WIDTH, WIDTH)]))
def call_and_forward_that_count(self: Any, x: Tensor) -> Tensor:
    return self.run(self.counts[1](self.counts[0](x)))


@trap(counts=lambda: Counts(WIDTH, WIDTH))
def call_and_forward_that_count_unless_told(self: Any, x: Tensor) -> Tensor:
    return self.run(self.counts(x, times=2) + self.counts(x))


class Held:
    """Leads to a layer, without being one."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer


@trap(counts=lambda: Counts(WIDTH, WIDTH), held=lambda: nn.ModuleList([nn.Linear(WIDTH, WIDTH)]))
def call_and_forward_that_count_beside_an_object(self: Any, x: Tensor) -> Tensor:
    held = Held(self.held[0])
    return self.run(self.counts(held.layer(x)) + held.layer(x))


@trap()
class Decorated(Net):
    """With decorated methods."""

    @doubled
    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.frozen(x) + self.half(x=x))

    @torch.no_grad()
    def frozen(self, x: Tensor) -> Tensor:
        return self.layers[0](x)

    half = functools.partialmethod(lambda self, x: self.layers[1](x) / 2)


@trap("safe", traced=lambda: torch.jit.trace(linear(), torch.zeros(2, 6, WIDTH)))
def traced_layer(self: Any, x: Tensor) -> Tensor:
    return self.run(self.traced(x))


@trap()
def children_by_name(self: Any, x: Tensor) -> Tensor:
    for name, child in self.layers.named_children():
        x = child(x) * (int(name) + 1)
    return self._modules["layers"]["0"](x) if False else self.run(x)


@trap()
def registry_used(self: Any, x: Tensor) -> Tensor:
    return self.run(self._modules["layers"]._modules["1"](x))


@trap()
def mapped_and_filtered(self: Any, x: Tensor) -> Tensor:
    outs = map(operator.methodcaller("tanh"), map(self.layers[0], (x, x * 2)))
    return self.run(sum(filter(lambda t: t.dim() == 3, outs)))


class Tagger(nn.Module):
    """Remembers its loss on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.loss: Any = None

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        self.loss = out.square().mean()
        return out


@trap("safe", tagger=Tagger)
def loss_left_on_a_layer(self: Any, x: Tensor) -> Tensor:
    out = self.run(self.tagger(x))
    return out + self.tagger.loss


class Told(nn.Module):
    """Reads what others set on it."""

    scale: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


@trap(told=Told)
def tensor_set_on_a_layer(self: Any, x: Tensor) -> Tensor:
    self.told.scale = x.mean()
    return self.run(self.told(x))


@trap(told=Told)
def number_set_on_a_layer(self: Any, x: Tensor) -> Tensor:
    self.told.scale = x.size(1)
    return self.run(self.told(x))


BOARD: dict[str, Any] = {}


class Writes(nn.Module):
    """Leaves a tensor on a board."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.layer, self.key = linear(), key

    def forward(self, x: Tensor) -> Tensor:
        BOARD[self.key] = self.layer(x)
        return x


class Takes(nn.Module):
    """Takes it from there."""

    def forward(self, x: Tensor) -> Tensor:
        return x + BOARD["k"]


@trap("safe", writes=lambda: Writes("k"), takes=Takes)
def handed_on_by_a_global(self: Any, x: Tensor) -> Tensor:
    return self.takes(self.run(self.writes(x)))


@trap("safe", writes=lambda: Writes("j"))
def read_from_a_global(self: Any, x: Tensor) -> Tensor:
    x = self.writes(x)
    return self.run(x + BOARD["j"])


def _collected(model: Any) -> None:
    model.seen = []
    model.layers[1].register_forward_hook(lambda m, a, out: model.seen.append(out))


@trap("safe", prepare=_collected)
def features_from_a_hook(self: Any, x: Tensor) -> Tensor:
    self.seen.clear()
    out = self.run(x)
    return out + self.seen[0]


@trap()
def hook_around_a_tensor(self: Any, x: Tensor) -> Tensor:
    y, scale = self.layers[0](x), x.detach().mean()
    if y.requires_grad:
        y.register_hook(lambda g: g * scale)
    return self.run(y)


@trap(target=linear, prepare=lambda m: m.target.requires_grad_(False))
def frozen_target(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = self.target(x)
    return self.run(x) - y


@trap("safe", target=linear, prepare=lambda m: m.target.requires_grad_(False))
def moving_target(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.target.weight.mul_(0.9).add_(self.layers[0].weight, alpha=0.1)
    return self.run(x) - self.target(x)


@trap("safe")
def buffer_registered_inside(self: Any, x: Tensor) -> Tensor:
    self.register_buffer("seen", x.detach().mean((0, 1)))
    return self.run(x - self.seen)


@trap()
def dropout_always(self: Any, x: Tensor) -> Tensor:
    return self.run(F.dropout(self.layers[0](x), 0.3, training=True))


class Counting(Function):
    """With numbers, flags and a tensor kept on its context, and gradients only where they are needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: dict[str, float], names: list[str], weight: Tensor) -> Any:
        ctx.how, ctx.names, ctx.weight = how, names, weight
        ctx.set_materialize_grads(False)
        return x * how["scale"] * weight, None, len(names)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        g = grads[0]
        needed = ctx.needs_input_grad
        x = g * ctx.how["scale"] * ctx.weight if needed[0] else None
        return x, None, None, g.sum((0, 1)) if needed[3] else None


@trap(token=lambda: nn.Parameter(torch.ones(WIDTH)))
def function_with_a_context(self: Any, x: Tensor) -> Tensor:
    out, nothing, n = Counting.apply(self.layers[0](x), {"scale": 0.5}, ["a", "b"], self.token)
    return self.run(out * n if nothing is None else out)


class Twice(Function):
    """Whose derivative has a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * x * 3


@trap()
def derivative_of_a_function(self: Any, x: Tensor) -> Any:
    with torch.enable_grad():
        y = x * 1 if x.requires_grad else x.detach().requires_grad_()
        out = Twice.apply(self.layers[0](y))
        (g,) = torch.autograd.grad(out.sum(), y, create_graph=True)
    return self.run(g)


@trap()
def checkpoint_of_a_closure(self: Any, x: Tensor) -> Tensor:
    scale = x.mean()

    def inner(y: Tensor, *, shift: float = 0.0) -> Tensor:
        return self.layers[0](y).tanh() * scale + shift

    return self.run(checkpoint(inner, x, use_reentrant=False, shift=0.5))


@trap()
def checkpoint_within_a_checkpoint(self: Any, x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return checkpoint(self.layers[1], self.layers[0](y), use_reentrant=False)

    return self.run(checkpoint(inner, x, use_reentrant=False))


@trap(stack=lambda: nn.Sequential(linear(), nn.Tanh(), linear()))
def checkpoint_of_a_sequence(self: Any, x: Tensor) -> Tensor:
    return self.run(checkpoint_sequential(self.stack, 2, x, use_reentrant=False))


@trap()
def checkpoint_with_dropout(self: Any, x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return F.dropout(self.layers[0](y), 0.4, self.training)

    return self.run(checkpoint(inner, x, use_reentrant=False))


@trap("safe")
def checkpoint_that_is_reentrant(self: Any, x: Tensor) -> Tensor:
    return self.run(checkpoint(self.layers[0], x, use_reentrant=True))


@contextlib.contextmanager
def scaling(model: Any, factor: float) -> Iterator[None]:
    """Changes an attribute for a while."""
    was, model.factor = model.factor, factor
    try:
        yield
    finally:
        model.factor = was


@trap(factor=lambda: 1.0)
def attribute_changed_for_a_while(self: Any, x: Tensor) -> Tensor:
    with scaling(self, 2.0):
        x = self.layers[0](x) * self.factor
    return self.run(x * self.factor)


@trap("safe", told=Told, prepare=lambda m: setattr(m.told, "scale", 1.0))
def layer_changed_for_a_while(self: Any, x: Tensor) -> Tensor:
    self.told.scale = 2.0
    y = self.told(x)
    self.told.scale = 1.0
    return self.run(y + self.told(x))


@trap()
def stack_of_contexts(self: Any, x: Tensor) -> Tensor:
    with contextlib.ExitStack() as stack:
        if self.training:
            stack.enter_context(torch.no_grad())
        y = self.layers[0](x)
    return self.run(x + y)


@trap()
def detached_in_place(self: Any, x: Tensor) -> Tensor:
    y = self.layers[0](x) + 1
    y.detach_()
    return self.run(y)


@trap()
def weight_frozen_inside(self: Any, x: Tensor) -> Tensor:
    self.layers[0].requires_grad_(False)
    y = self.layers[0](x)
    self.layers[0].requires_grad_(True)
    return self.run(y)


@trap()
def single_dispatch_method(self: Any, x: Tensor) -> Tensor:
    return self.run(_applied(self.layers[0], x))


@functools.singledispatch
def _applied(layer: Any, x: Tensor) -> Any:
    raise TypeError(layer)


@_applied.register
def _(layer: nn.Linear, x: Tensor) -> Any:
    return layer(x) * 2


@trap()
def results_that_share_memory(self: Any, x: Tensor) -> Any:
    out = self.run(x)
    return out, out, out.view(-1), out[:, 0], x


@trap("safe")
def result_with_the_model(self: Any, x: Tensor) -> Any:
    return {"out": self.run(x), "shape": x.shape, "dtype": x.dtype, "kind": "hidden"}


class Lora(nn.Module):
    """A low-rank addition that can be merged."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.merged = linear(), False
        self.a, self.b = nn.Parameter(torch.ones(2, WIDTH)), nn.Parameter(torch.ones(WIDTH, 2) / 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) if self.merged else self.base(x) + x @ self.a.t() @ self.b.t()


def _merge(model: Any) -> None:
    with torch.no_grad():
        model.lora.base.weight.add_(model.lora.b @ model.lora.a)
    model.lora.merged = True


@trap(lora=Lora, later=_merge)
def merged_later(self: Any, x: Tensor) -> Tensor:
    return self.run(self.lora(x))


class Blocks(nn.Module):
    """Opened, with glue of its own that goes by its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(linear(), nn.Tanh()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.dropout(x + block(x), 0.4, self.training)
        return x


@trap(encoder=Blocks, later=lambda m: m.encoder.eval())
def opened_part_frozen_later(self: Any, x: Tensor) -> Tensor:
    return self.run(self.encoder(x))


@trap(encoder=Blocks, later=lambda m: m.encoder.train())
def opened_part_trains_while_the_rest_does_not(self: Any, x: Tensor) -> Tensor:
    return self.run(self.encoder(x))


@trap(prepare=lambda m: buffers(m, adjacency=torch.eye(WIDTH).to_sparse()))
def sparse_buffer(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.sparse.mm(self.adjacency, x.flatten(0, 1).t()).t().view(x.shape))


@trap(phase=lambda: nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64)))
def complex_weight(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.view_as_real(x * self.phase).sum(-1))


@trap("safe")
def quantised(self: Any, x: Tensor) -> Tensor:
    q = torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8)
    return self.run(q.dequantize() + x)


class Unit(torch.Tensor):
    """A subclass that counts what is done to it."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Unit.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@trap("safe")
def subclass_that_counts(self: Any, x: Tensor) -> Tensor:
    y = x.as_subclass(Unit) * 2
    return self.run(y.as_subclass(Tensor) * (2 if Unit.calls > 40 else 1))


@trap("safe", token=lambda: nn.Parameter(torch.ones(WIDTH).as_subclass(Unit)))
def subclass_as_a_weight(self: Any, x: Tensor) -> Tensor:
    return self.run((x * self.token).as_subclass(Tensor))


@trap(seen=lambda: collections.OrderedDict(a=1.0))
def ordered_settings(self: Any, x: Tensor) -> Tensor:
    self.seen.move_to_end("a")
    return self.run(x * self.seen["a"])
