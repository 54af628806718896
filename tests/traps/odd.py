"""Torch and Python used in ways that few think of: modes, wrappers, other code, reads that look harmless."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from .registry import WIDTH, Net, buffers, sequences, trap
from .values import with_lengths


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


# ------------------------------------------------------------ numbers


@trap()
def whole_root(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if math.sqrt(x.size(1)).is_integer() else x)


@trap("safe")
def elements_of_a_shape(self: Any, x: Tensor) -> Tensor:
    return self.run(x / x.shape.numel() + x.shape[1:].numel())


def many_rows(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """Six times as many rows as asked."""
    return sequences(6 * batch, length, seed)


@trap("safe", inputs=many_rows)
def digits_of_many_rows(self: Any, x: Tensor) -> Tensor:
    return self.run(x * len(str(len(x))))


def long_rows(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """Eleven times as long as asked."""
    return sequences(batch, 11 * length if seed % 2 else length, seed)


@trap("safe", inputs=long_rows)
def threshold_by_a_root(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if x.size(1) ** 0.5 > 7.5 else x)


@trap("safe", inputs=long_rows)
def threshold_by_a_quotient(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if x.size(1) / 8 > 7 else x)


@trap("safe", inputs=long_rows)
def threshold_by_text(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if len(f"{x.size(1)}") > 1 else x)


@trap("safe", inputs=long_rows)
def threshold_in_a_list(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if torch.arange(x.size(1)).tolist()[-1] > 50 else x)


@trap("safe", inputs=long_rows)
def threshold_of_numpy(self: Any, x: Tensor) -> Tensor:
    import numpy as np

    return self.run(x * 2 if np.prod(x.shape[1:]) > 500 else x)


@trap("safe", inputs=with_lengths)
def filled_with_data(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    filled = torch.full_like(x[0, 0], lengths.max())
    return self.run(x * 2 if filled.sum() > 4 * WIDTH else x)


@trap("safe", inputs=with_lengths)
def made_anew_of_data(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    made = x.new_full((2,), lengths[0])
    return self.run(x * 2 if made.sum() > 6 else x)


@trap("safe")
def text_decides(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if "-" in repr(x.detach()[0, 0, 0]) else x)


@trap("safe")
def storage_decides(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if x.detach().untyped_storage()[3] > 63 else x)


# ------------------------------------------------------------ modes and contexts


class Doubling(TorchFunctionMode):
    """A user's own mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.tanh else out


@trap("safe")
def mode_of_ones_own(self: Any, x: Tensor) -> Tensor:
    with Doubling():
        y = torch.tanh(self.layers[0](x))
        y = self.layers[1](y)
    return self.run(y)


class Rounding(TorchDispatchMode):
    """A mode below autograd."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.round() if func is torch.ops.aten.tanh.default else out


@trap("safe")
def mode_below_autograd(self: Any, x: Tensor) -> Tensor:
    with Rounding():
        y = torch.tanh(x)
    return self.run(y)


@trap("safe")
def default_dtype_inside(self: Any, x: Tensor) -> Tensor:
    was = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    scale = torch.full((), 1 / 3)
    torch.set_default_dtype(was)
    return self.run((x * scale.expand(1)).float())


@trap()
def device_as_a_context(self: Any, x: Tensor) -> Tensor:
    with torch.device("cpu"):
        return self.run(x + torch.arange(WIDTH))


@trap()
def kernel_that_is_chosen(self: Any, x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        y = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    return self.run(y)


@trap("safe")
def attention_by_score(self: Any, x: Tensor) -> Tensor:
    q = x.detach()[:, None].expand(-1, 2, -1, -1)  # on a CPU it has no backward
    return self.run(flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s - (i - j).abs()).sum(1))


@trap("safe")
def asynchronous(self: Any, x: Tensor) -> Tensor:
    async def layer(y: Tensor) -> Tensor:
        await asyncio.sleep(0)
        return self.layers[0](y)

    loop = asyncio.new_event_loop()
    try:
        return self.run(loop.run_until_complete(layer(x)))
    finally:
        loop.close()


@trap("safe")
def forked_by_the_interpreter(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.jit.wait(torch.jit.fork(torch.sin, x)))


@trap("safe", prepare=lambda m: m.layers[0].compile(backend="eager"))
def layer_compiled_in_place(self: Any, x: Tensor) -> Tensor:
    return self.run(x)


class Script(nn.Module):
    """With a method that is scripted beside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    @torch.jit.export
    def twice(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


@trap("safe", script=lambda: torch.jit.script(Script()))
def method_of_a_script(self: Any, x: Tensor) -> Tensor:
    return self.run(self.script.twice(x))


@trap("safe", traced=lambda: torch.fx.symbolic_trace(nn.Sequential(linear(), nn.ReLU(), linear())))
def graph_module_inside(self: Any, x: Tensor) -> Tensor:
    return self.run(self.traced(x))


@trap(prepare=lambda m: prune.l1_unstructured(m.layers[0], "weight", 0.5))
def pruned(self: Any, x: Tensor) -> Tensor:
    return self.run(x)


@trap("safe", prepare=lambda m: prune.l1_unstructured(m.layers[0], "weight", 0.5))
def pruned_in_glue(self: Any, x: Tensor) -> Tensor:
    return self.run(F.linear(self.layers[0](x), self.layers[0].weight))


# ------------------------------------------------------------ derivatives


class Once(Function):
    """Derived once, with two results of which one is not derived, and one argument in a list."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Any) -> Any:
        out, sign = x * weights[0], x.sign()
        ctx.save_for_backward(x)
        ctx.weights = weights
        ctx.mark_non_differentiable(sign)
        return out, sign

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * ctx.weights[0] + x * 0.1, None


@trap()
def function_derived_once(self: Any, x: Tensor) -> Tensor:
    out, sign = Once.apply(self.layers[0](x), [0.5, 2.0])
    return self.run(out + sign)


@trap("safe")
def function_made_in_forward(self: Any, x: Tensor) -> Tensor:
    scale = x.detach().mean()

    class Scales(Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * scale

    return self.run(Scales.apply(self.layers[0](x)))


@trap("safe")
def hook_on_a_node(self: Any, x: Tensor) -> Tensor:
    y = self.layers[0](x)
    if y.grad_fn is not None:
        y.grad_fn.register_prehook(lambda grads: tuple(g * 0.5 for g in grads))
    return self.run(y)


@trap()
def gradient_retained(self: Any, x: Tensor) -> Tensor:
    y = self.layers[0](x)
    if y.requires_grad:
        y.retain_grad()
    return self.run(y)


@trap(strength=lambda: 0.5, later=lambda m: setattr(m, "strength", 3.0))
def hook_by_an_attribute_changed_later(self: Any, x: Tensor) -> Tensor:
    y = self.layers[0](x)
    if y.requires_grad:
        y.register_hook(lambda g: g * self.strength)
    return self.run(y)


@trap()
def penalised_in_training(self: Any, x: Tensor) -> Any:
    out = self.run(x)
    if not self.training:
        return out
    return out + sum(p.square().sum() for p in self.parameters()) / 99


@trap()
def standardised_weight(self: Any, x: Tensor) -> Tensor:
    weight = self.layers[0].weight
    return self.run(F.linear(x, (weight - weight.mean()) / weight.std(), self.layers[0].bias))


@trap("safe")
def weights_by_name(self: Any, x: Tensor) -> Tensor:
    state = self.state_dict()
    return self.run(F.linear(x, state["layers.0.weight"]) + self.get_parameter("layers.1.bias"))


@trap("safe")
def other_checkpoint(self: Any, x: Tensor) -> Tensor:
    def around() -> Any:
        return contextlib.nullcontext(), contextlib.nullcontext()

    return self.run(checkpoint(self.layers[0], x, use_reentrant=False, context_fn=around))


# ------------------------------------------------------------ code of other kinds


@trap("safe")
def failure_that_is_handled(self: Any, x: Tensor) -> Tensor:
    gram = x.detach().transpose(1, 2) @ x.detach() - 4 * torch.eye(WIDTH)
    try:
        factor = torch.linalg.cholesky(gram)
    except torch.linalg.LinAlgError:
        factor = torch.linalg.cholesky(gram + 9 * torch.eye(WIDTH))
    return self.run(x @ factor)


def _bound(model: Any) -> None:
    model.forward = functools.partial(type(model).other, model)


@trap("safe", prepare=_bound)
class ForwardOnTheInstance(Net):
    """Whose forward is another method, set on the instance."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def other(self, x: Tensor) -> Tensor:
        return self.run(x * 2)


@trap()
class Computed(Net):
    """Answers for attributes that it does not have."""

    def __getattr__(self, name: str) -> Any:
        if name == "doubled":
            return self.layers[0].weight * 2
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x @ self.doubled)


@trap()
class Halving(Net):
    """Calls itself on half of its input."""

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        return self.run(x) if depth == 0 else self(x * 0.5, depth - 1) + self.forward(x, 0)


class Wrapped:
    """No tensor, but torch's functions take it."""

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [a.inner if isinstance(a, Wrapped) else a for a in args]
        return Wrapped(func(*args, **(kwargs or {})) + 1)


@trap("safe")
def wrapper_that_torch_takes(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.tanh(Wrapped(x)).inner)


@trap("safe")
def attribute_of_a_tensor(self: Any, x: Tensor) -> Tensor:
    y = x * 1
    y.scale = x.size(1)
    return self.run(y * y.scale)


@torch.library.custom_op("autopipe_traps::gather", mutates_args=("total",))
def gathered(total: Tensor, x: Tensor) -> None:
    total.add_(x.mean((0, 1)))


@trap("safe", prepare=lambda m: buffers(m, total=torch.zeros(WIDTH)))
def operator_that_writes(self: Any, x: Tensor) -> Tensor:
    gathered(self.total, x.detach())
    return self.run(x - self.total)


@trap("safe")
def model_cast_inside(self: Any, x: Tensor) -> Tensor:
    return self.to(x.dtype).run(x)


@trap("safe")
def built_from_text(self: Any, x: Tensor) -> Tensor:
    return self.run(eval("lambda y: y * 2 if y.size(1) > 7 else y")(x))


@trap()
def copied_container(self: Any, x: Tensor) -> Tensor:
    kept = copy.copy({"a": [x, x * 2]})
    kept["a"] = [t + 1 for t in kept["a"]]
    return self.run(sum(kept["a"]))


@trap()
def ordered_by_elements(self: Any, x: Tensor) -> Tensor:
    parts = sorted([x, x[:, :2], x[:, :1]], key=lambda t: t.numel())
    table = {t: i + 1 for i, t in enumerate(parts)}
    return self.run(torch.cat([t * table[t] for t in parts], 1))


@trap("safe")
def loop_of_torch(self: Any, x: Tensor) -> Tensor:
    from torch._higher_order_ops import while_loop

    _, out = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 1.1), (torch.tensor(0), x))
    return self.run(out)


class Cast(Function):
    """With torch's own decorators for autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.saved_tensors[0].exp()


@trap(around=lambda: torch.autocast("cpu", torch.bfloat16))
def function_with_a_cast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = Cast.apply(self.layers[0](x))
    return self.run(y.float())


@trap()
def size_found_without_data(self: Any, x: Tensor) -> Tensor:
    shape = F.conv1d(x.transpose(1, 2).to("meta"), torch.empty(4, WIDTH, 3, device="meta")).shape
    return self.run(x / shape[-1])


@trap("safe")
def hook_for_one_call(self: Any, x: Tensor) -> Tensor:
    seen: list[Tensor] = []
    handle = self.layers[1].register_forward_hook(lambda m, a, out: seen.append(out))
    out = self.run(x)
    handle.remove()
    return out + seen[0]


@trap("safe")
def layers_swapped_for_a_while(self: Any, x: Tensor) -> Tensor:
    self.layers[0], self.layers[1] = self.layers[1], self.layers[0]
    out = self.run(x)
    self.layers[0], self.layers[1] = self.layers[1], self.layers[0]
    return out


@trap()
def forward_of_the_class(self: Any, x: Tensor) -> Tensor:
    return self.run(nn.Linear.forward(self.layers[0], x) + nn.Module.__call__(self.layers[1], x))


@trap("safe", tied=linear)
def weights_tied_by_each_call(self: Any, x: Tensor) -> Tensor:
    self.tied.weight = self.layers[0].weight
    return self.run(self.tied(x))


@trap("safe")
def graph_of_before_kept(self: Any, x: Tensor) -> Tensor:
    out = self.run(x)
    self.before = out.detach()
    return out + self.before.mean()


@trap("safe", prepare=lambda m: buffers(m, is_on=torch.tensor(True)), later=lambda m: m.is_on.fill_(False))
def branch_on_a_buffer(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if self.is_on else x)


@trap(prepare=lambda m: buffers(m, limit=torch.tensor(2.0)), later=lambda m: m.limit.fill_(0.1))
def number_of_a_buffer(self: Any, x: Tensor) -> Tensor:
    return self.run(x.clamp(max=self.limit.item()))
