"""What Python lets a class, a container or a function do that a recording may not see."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import queue
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .registry import WIDTH, Net, buffers, trap


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


@trap()
class overridden_call(Net):
    def __call__(self: Any, x: Tensor) -> Any:
        return super().__call__(x) * 2

    def forward(self: Any, x: Tensor) -> Any:
        return self.run(x)


@trap(later=lambda m: setattr(m, "base", 3.0))
class getattr_that_computes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.base = 1.0

    def __getattr__(self, name: Any) -> Any:
        if name == "gain":
            return self.base * 2
        return super().__getattr__(name)

    def forward(self: Any, x: Tensor) -> Any:
        return self.run(x * self.gain)


@trap()
class setattr_that_doubles(Net):
    def __setattr__(self, name, value):
        if name == "hidden":
            value = value * 2
        super().__setattr__(name, value)

    def forward(self: Any, x: Tensor) -> Any:
        self.hidden = self.layers[0](x)
        out = self.run(self.hidden)
        self.hidden = x.mean() * 0
        return out


@trap("safe")
def sent_generator(self: Any, x: Tensor) -> Any:
    def gen():
        y = yield
        while True:
            y = yield torch.tanh(y)

    g = gen()
    next(g)
    for layer in self.layers:
        x = g.send(layer(x))
    g.close()
    return x


@trap()
def generator_with_yield_from(self: Any, x: Tensor) -> Any:
    def inner(a):
        for layer in self.layers[:2]:
            a = layer(a)
            yield a
        return a

    def outer():
        a = yield from inner(x)
        yield a * 2

    return torch.stack(list(outer())).sum(0)


@contextlib.contextmanager
def kept(model: Any, x: Tensor) -> Any:
    old = model.scale
    model.scale = 2.0
    try:
        yield x + 1
    finally:
        model.scale = old


@trap(scale=lambda: 1.0)
def contextmanager_that_yields(self: Any, x: Tensor) -> Any:
    with kept(self, x) as y:
        z = self.run(y * self.scale)
    return z * self.scale


@trap("safe")
def match_with_guard(self: Any, x: Tensor) -> Any:
    match {"n": x.size(1), "x": x}:
        case {"n": n, "x": Tensor() as t} if n > 8:
            return self.run(t * 2)
        case {"x": t}:
            return self.run(t)


@trap()
def late_binding(self: Any, x: Tensor) -> Any:
    fns = [lambda t: torch.tanh(layer(t)) for layer in self.layers]  # noqa: B023
    return fns[0](fns[1](x))


@trap()
def star_args_and_dicts(self: Any, x: Tensor) -> Any:
    def f(*a, scale=1, **k):
        return sum(a) * scale + k["bias"]

    a, *rest = x.unbind(1)
    y = f(a, *rest[:2], scale=2, bias=a)
    return self.run(y)


@trap()
def weak_proxy(self: Any, x: Tensor) -> Any:
    p = weakref.proxy(self)
    for layer in p.layers:
        x = torch.tanh(layer(x))
    return x


class Mode(enum.Flag):
    A = 1
    B = 2


@trap(later=lambda m: setattr(m, "mode", Mode.B), mode=lambda: Mode.A | Mode.B)
def flags_of_an_enum(self: Any, x: Tensor) -> Any:
    if Mode.A in self.mode:
        x = x * 2
    if self.mode & Mode.B:
        x = x + 1
    return self.run(x)


@trap("safe")
class iterated_itself(Net):
    def __iter__(self):
        return iter(self.layers)

    def __len__(self):
        return len(self.layers)

    def __getitem__(self, i: Any) -> Any:
        return self.layers[i]

    def __contains__(self, layer: Any) -> Any:
        return any(layer is k for k in self.layers)

    def forward(self: Any, x: Tensor) -> Any:
        for layer in self:
            x = torch.tanh(layer(x))
        return self[-1](x) / len(self)


@trap(
    "safe",
    later=lambda m: m.named.__setitem__("a", m.named.pop("a")),
    named=lambda: nn.ModuleDict({"a": linear(), "b": nn.Tanh()}),
)
def order_of_a_module_dict_later(self: Any, x: Tensor) -> Any:
    for layer in self.named.values():
        x = layer(x)
    return self.run(x)


@trap(
    "safe",
    later=lambda m: m.gains.append(nn.Parameter(torch.ones(WIDTH) * 2)),
    gains=lambda: nn.ParameterList([torch.ones(WIDTH)]),
)
def parameter_list_grows_later(self: Any, x: Tensor) -> Any:
    for g in self.gains:
        x = x * g
    return self.run(x)


@trap("safe", later=lambda m: m.layers.insert(0, nn.Tanh()))
def layer_inserted_later(self: Any, x: Tensor) -> Any:
    return self.run(x)


def _swap(m: Any) -> None:
    a, b = m.layers[0], m.layers[1]
    m.layers[0], m.layers[1] = b, a


@trap("safe", later=_swap)
def layers_swapped_later(self: Any, x: Tensor) -> Any:
    return self.run(x)


@trap(
    later=lambda m: m.part.keywords.update(scale=3),
    part=lambda: functools.partial(lambda t, scale: t * scale, scale=2),
)
def keywords_of_a_partial_changed_later(self: Any, x: Tensor) -> Any:
    return self.run(self.part(x))


@trap("safe")
class counter_by_the_dict(Net):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def forward(self: Any, x: Tensor) -> Any:
        self.__dict__["n"] += 1
        return self.run(x * self.n)


@trap("safe")
def counter_that_comes_by_the_dict(self: Any, x: Tensor) -> Tensor:
    held = self.__dict__
    held["n"] = held.get("n", 0) + 1
    return self.run(x) * (1 + held["n"] % 2)


@trap("safe", prepare=lambda m: buffers(m, n=torch.zeros(())))
def buffer_by_the_dict_of_buffers(self: Any, x: Tensor) -> Any:
    self._buffers["n"] += 1
    return self.run(x * self._buffers["n"])


@trap("safe", prepare=lambda m: buffers(m, n=torch.zeros(())))
def buffer_by_state_dict(self: Any, x: Tensor) -> Any:
    self.state_dict()["n"].add_(1)
    return self.run(x * self.n)


@trap("safe", prepare=lambda m: buffers(m, n=torch.zeros(())))
def buffers_iterated(self: Any, x: Tensor) -> Any:
    for b in self.buffers():
        b.add_(1)
    return self.run(x * self.n)


@trap("safe", prepare=lambda m: buffers(m, n=torch.zeros(())))
def state_loaded_inside(self: Any, x: Tensor) -> Any:
    state = self.state_dict()
    state["n"] = state["n"] + 1
    self.load_state_dict(state)
    return self.run(x * self.n)


@trap(around=lambda: contextlib.nullcontext())
def norm_of_all_parameters(self: Any, x: Tensor) -> Any:
    return self.run(x), sum(p.square().sum() for p in self.parameters())


@trap()
def parameters_as_a_vector(self: Any, x: Tensor) -> Any:
    v = nn.utils.parameters_to_vector(self.layers.parameters())
    return self.run(x) + v.mean()


@trap(later=lambda m: m.layers.to(torch.bfloat16))
def cast_to_the_dtype_of_a_layer(self: Any, x: Tensor) -> Any:
    return self.run(x.to(self.layers[0].weight.dtype)).float()


@trap()
def by_its_locals(self: Any, x: Tensor) -> Any:
    y = x * 2
    return self.run(locals()["y"])


@dataclasses.dataclass
class State:
    x: Tensor
    n: int = 1


@trap("safe")
def as_a_dict_of_a_dataclass(self: Any, x: Tensor) -> Any:
    s = dataclasses.asdict(State(x))
    return self.run(s["x"] * s["n"])


@trap()
def numpy_number_from_the_left(self: Any, x: Tensor) -> Any:
    return self.run(np.float32(2) * x + np.float64(1.5))


@trap("safe")
def numpy_function_of_a_tensor(self: Any, x: Tensor) -> Any:
    return self.run(np.abs(x.detach()))


@trap("safe")
def data_ptr_as_key(self: Any, x: Tensor) -> Any:
    seen = {x.data_ptr(): 1}
    y = x * 2
    return self.run(x * seen.get(y.data_ptr(), 3))


@trap("safe")
def tensor_as_key(self: Any, x: Tensor) -> Any:
    d = {x: 1.0}
    y = x.view_as(x)
    return self.run(y * d.get(y, 2.0) * d[x])


@trap("safe", q=queue.Queue)
def queue_kept(self: Any, x: Tensor) -> Any:
    self.q.put(float(x.mean()))
    n = self.q.qsize()
    return self.run(x * (2 if n > 4 else 1))


class Cleans:
    def __init__(self, m: Any) -> Any:
        self.m = m

    def __del__(self):
        self.m.scale = self.m.scale + 1


@trap("safe", scale=lambda: 1.0)
def changed_by_a_finaliser(self: Any, x: Tensor) -> Any:
    Cleans(self)
    return self.run(x * self.scale)


@trap()
def suppressed(self: Any, x: Tensor) -> Any:
    y = x
    with contextlib.suppress(RuntimeError):
        y = y * 2
        y = y @ torch.ones(3, 3)
    return self.run(y)


@trap("safe")
class partial_method(Net):
    def scaled(self, x, by):
        return x * by

    twice = functools.partialmethod(scaled, by=2)

    def forward(self: Any, x: Tensor) -> Any:
        return self.run(self.twice(x))


class Meta(type):
    def __call__(cls, *a, **k):
        m = super().__call__(*a, **k)
        m.extra = 3.0
        return m


@trap(later=lambda m: setattr(m, "extra", 5.0))
class made_by_a_metaclass(Net, metaclass=Meta):
    def forward(self: Any, x: Tensor) -> Any:
        return self.run(x * self.extra)


class Slot(nn.Module):
    __slots__ = ("gain",)

    def __init__(self) -> None:
        super().__init__()
        self.gain = 2.0
        self.lin = linear()

    def forward(self: Any, x: Tensor) -> Any:
        return self.lin(x) * self.gain


@trap(later=lambda m: setattr(m.part, "gain", 3.0), part=Slot)
def slot_of_a_leaf(self: Any, x: Tensor) -> Any:
    return self.run(self.part(x))


@trap("safe")
def complex_of_python(self: Any, x: Tensor) -> Any:
    return self.run((x * complex(1, 2)).abs())
