"""Derivatives inside forward, custom functions under any name, and grad modes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, grad
from torch.utils.checkpoint import checkpoint

from .registry import WIDTH, trap


class Scaled(Function):
    """Whose gradient is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.factor, None


class Quantised(Function):
    """In the newer form, with a setup of its own and two results."""

    @staticmethod
    def forward(x: Tensor) -> Any:
        return x.round(), x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * (x.abs() < 1)


class Written(Function):
    """That writes to its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 3


scaled = Scaled.apply
half = functools.partial(lambda f, x: f(x, 0.5), Scaled.apply)


@trap()
def forces(self: Any, x: Tensor) -> Any:
    with torch.enable_grad():
        x = x.requires_grad_() if x.is_leaf else x
        energy = self.run(x).square().sum()
        return energy, -torch.autograd.grad(energy, x, create_graph=True)[0]


@trap()
def forces_without_graph(self: Any, x: Tensor) -> Any:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.layers[0](y).tanh().sum(), y)
    return self.run(x - force)


@trap()
def grad_bound_at_import(self: Any, x: Tensor) -> Any:
    with torch.enable_grad():
        y = x * 1
        y = y if y.requires_grad else y.requires_grad_()
        u = self.layers[0](y).sin()
        du = grad(u, y, torch.ones_like(u), create_graph=True, retain_graph=True)[0]
        ddu = grad(du.sum(), y, create_graph=True)[0]
    return self.run(x + du + ddu)


@trap()
def penalty_on_weights(self: Any, x: Tensor) -> Any:
    with torch.enable_grad():
        y = self.layers[0](x).tanh()
        (g,) = torch.autograd.grad(y.sum(), self.layers[0].weight, create_graph=True)
    return self.run(y) + g.square().mean()


@trap("safe")
def functional_jacobian(self: Any, x: Tensor) -> Tensor:
    jacobian = torch.autograd.functional.jacobian(lambda t: t.sin().sum(-1), x, create_graph=True)
    return self.run(x + jacobian.sum((0, 1)))


@trap("safe")
def func_grad(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.func.grad(lambda t: t.sin().sum())(x))


@trap("safe")
def func_grad_of_layers(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.func.grad(lambda t: self.run(t).square().sum())(x))


class Factored(nn.Module):
    """Of layers with names of their own, which it reaches by itself in functions that are transformed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.last(self.transformed(self.first(x))))


@trap()
class FuncGradOfOwnLayer(Factored):
    def transformed(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda t: (self.inner(t).tanh() * self.factor).sum())(x)


@trap()
class FuncJvpOfOwnMethod(Factored):
    def field(self, x: Tensor) -> Tensor:
        return self.inner(x).sin()

    def transformed(self, x: Tensor) -> Tensor:
        value, tangent = torch.func.jvp(self.field, (x,), (torch.ones_like(x),))
        return value + tangent


@trap(later=lambda m: setattr(m, "factor", 3.0))
class FuncGradWithFactorThatChanges(FuncGradOfOwnLayer):
    pass


@trap(later=lambda m: setattr(m, "factor", 3.0))
class FuncGradAroundNumberThatChanges(Factored):
    def transformed(self, x: Tensor) -> Tensor:
        inner, factor = self.inner, self.factor
        return torch.func.grad(lambda t: (inner(t).tanh() * factor).sum())(x)


@trap(later=lambda m: setattr(m, "rounds", range(3)))
class FuncGradAroundRangeThatChanges(Factored):
    rounds = range(1)

    def transformed(self, x: Tensor) -> Tensor:
        inner, rounds = self.inner, self.rounds
        return torch.func.grad(lambda t: (inner(t).tanh() * len(rounds)).sum())(x)


@trap()
class FuncGradAroundNumberByMode(Factored):
    def transformed(self, x: Tensor) -> Tensor:
        inner, factor = self.inner, 3.0 if self.training else 1.0
        return torch.func.grad(lambda t: (inner(t).tanh() * factor).sum())(x)


class Chosen(Factored):
    """Derives by one of two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.place = 0

    def by(self, place: int, x: Tensor) -> Tensor:
        inner = self.inner
        return torch.func.grad(lambda a, b: (inner(a).tanh() * b).sum(), argnums=place)(x, x * 2)

    def transformed(self, x: Tensor) -> Tensor:
        return self.by(self.place, x)


@trap(later=lambda m: setattr(m, "place", 1))
class FuncGradByArgumentThatChanges(Chosen):
    pass


@trap()
class FuncGradByArgumentOfMode(Chosen):
    def transformed(self, x: Tensor) -> Tensor:
        return self.by(int(self.training), x)


@trap(later=lambda m: setattr(m, "factor", 3.0))
class KeptMethodWithFactorThatChanges(Factored):
    def transformed(self, x: Tensor) -> Tensor:
        steps = 0
        while x.norm().item() > 1 and steps < 20:
            x, steps = self.inner(x).tanh() * 0.1 * self.factor, steps + 1
        return x


@trap(later=lambda m: setattr(m, "epoch", 1))
class KeptMethodBesideWhatChanges(KeptMethodWithFactorThatChanges):
    pass


@trap("safe")
def func_jacrev(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.func.jacrev(lambda t: t.square().sum((0, 1)))(x).sum(0))


@trap("safe")
def func_jvp(self: Any, x: Tensor) -> Tensor:
    value, tangent = torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))
    return self.run(value + tangent)


@trap()
def func_vjp(self: Any, x: Tensor) -> Tensor:
    value, pull = torch.func.vjp(torch.sin, x)
    return self.run(value + pull(torch.ones_like(value))[0])


@trap()
class FuncVjpOfOwnLayer(Factored):
    def transformed(self, x: Tensor) -> Tensor:
        value, pull = torch.func.vjp(lambda t, u: self.inner(t).tanh() * u * self.factor, x, x + 1)
        first, second = pull(x.cos(), retain_graph=True)
        return value + first + pull(value)[1] * second


@trap()
def func_vjp_with_aux(self: Any, x: Tensor) -> Tensor:
    value, pull, aux = torch.func.vjp(lambda t: ((t.sin(), t.exp()), {"cos": t.cos()}), x, has_aux=True)
    return self.run(value[0] + pull((x, aux["cos"]))[0] + value[1] * 0.1)


@trap()
def func_vjp_that_nobody_pulls(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.func.vjp(torch.sin, x)[0])


@trap("safe")
def func_vjp_of_draws(self: Any, x: Tensor) -> Tensor:
    value, pull = torch.func.vjp(lambda t: torch.nn.functional.dropout(t, 0.5), x)
    return self.run(value + pull(torch.ones_like(value))[0])


@trap()
def functionalized(self: Any, x: Tensor) -> Tensor:
    def written(t: Tensor) -> Tensor:
        y = self.layers[0](t).clone()
        y[..., 0].mul_(2)
        return y.tanh_()

    return self.run(torch.func.functionalize(written, remove="mutations_and_views")(x) + x)


@trap("safe")
def forward_mode(self: Any, x: Tensor) -> Tensor:
    import torch.autograd.forward_ad as fwad

    with fwad.dual_level():
        dual = fwad.make_dual(x, torch.ones_like(x))
        tangent = fwad.unpack_dual(dual.sin()).tangent
    return self.run(x + tangent)


@trap("safe")
def hessian(self: Any, x: Tensor) -> Tensor:
    return self.run(x * torch.func.hessian(lambda t: t.pow(3).sum())(x.mean((0, 1))).diagonal())


@trap()
def vmapped(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.vmap(lambda row: row * row.mean() + x.mean())(x))


@trap("safe")
def vmapped_layer(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.vmap(lambda row: self.layers[0](row))(x))


@trap("safe")
def vmapped_over_parameters(self: Any, x: Tensor) -> Tensor:
    parameters, buffers = torch.func.stack_module_state(list(self.layers))
    base = self.layers[0]
    called = torch.vmap(lambda p, b: torch.func.functional_call(base, (p, b), (x,)))
    return called(parameters, buffers).mean(0)


@trap()
def functional_call(self: Any, x: Tensor) -> Tensor:
    weights = {n: p * 0.5 for n, p in self.layers[0].named_parameters()}
    return self.run(torch.func.functional_call(self.layers[0], weights, (x,)))


@trap()
def functional_call_with_weights_of_another_layer(self: Any, x: Tensor) -> Tensor:
    first, second = self.layers[:2]
    return self.run(torch.func.functional_call(first, dict(second.named_parameters()), (x,)) + first(x))


@trap("refused")
def backward_inside(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        y.square().sum().backward()
    return self.run(x + y.grad)


@trap()
def custom_function(self: Any, x: Tensor) -> Tensor:
    return self.run(Scaled.apply(self.layers[0](x), 0.25))


@trap()
def apply_bound_at_import(self: Any, x: Tensor) -> Tensor:
    return self.run(scaled(self.layers[0](x), 0.25))


@trap(function=lambda: Scaled.apply)
def apply_as_attribute(self: Any, x: Tensor) -> Tensor:
    return self.run(self.function(self.layers[0](x), 0.25))


@trap()
def apply_in_a_partial(self: Any, x: Tensor) -> Tensor:
    return self.run(half(self.layers[0](x)))


@trap()
def apply_by_default_argument(self: Any, x: Tensor, function: Any = Scaled.apply) -> Tensor:
    return self.run(function(self.layers[0](x), 0.25))


@trap()
def two_results(self: Any, x: Tensor) -> Tensor:
    quantised, sign = Quantised.apply(self.layers[0](x))
    return self.run(quantised + sign)


@trap("safe")
def written_by_function(self: Any, x: Tensor) -> Tensor:
    return self.run(Written.apply(self.layers[0](x)))


@trap()
def straight_through(self: Any, x: Tensor) -> Tensor:
    y = self.layers[0](x)
    return self.run(y + (y.round() - y).detach())


@trap()
def saved_tensors_hooks(self: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 0.5):
        y = self.layers[0](x).square()
    return self.run(y)


@trap()
def saved_on_cpu(self: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        y = self.layers[0](x).sin()
    return self.run(y)


@trap()
def tensor_hook(self: Any, x: Tensor) -> Tensor:
    y = self.layers[0](x)
    if y.requires_grad:
        y.register_hook(lambda g: g * 0.1)
    return self.run(y)


@trap()
def no_grad(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = self.layers[0](x)
    return self.run(y + x)


@trap("safe")
def inference_mode(self: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = self.layers[0](x)
    return self.run(y.clone() + x)


@trap()
def grad_by_mode(self: Any, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(not self.training):
        y = self.layers[0](x)
    return self.run(y)


@trap()
def branch_on_grad_mode(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if torch.is_grad_enabled() else x)


@trap(around=torch.no_grad)
def branch_on_grad_mode_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if torch.is_grad_enabled() else x)


@trap("safe")
def branch_on_requires_grad(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if x.requires_grad else x)


@trap("safe")
def branch_on_grad_fn(self: Any, x: Tensor) -> Tensor:
    return self.run(x if (x * 2).grad_fn is None else x + 1)


@trap(later=lambda m: m.layers[0].requires_grad_(False))
def branch_on_frozen_weights(self: Any, x: Tensor) -> Tensor:
    return self.run(x * 2 if self.layers[0].weight.requires_grad else x)


@trap(later=lambda m: m.layers[0].requires_grad_(False))
def frozen_later(self: Any, x: Tensor) -> Tensor:
    return self.run(x)


def _gained(model: Any) -> None:
    model.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))


def _frozen(model: Any) -> None:
    model.gain.requires_grad_(False)
    model.layers[0].requires_grad_(False)


@trap(prepare=_gained, later=_frozen)
def frozen_later_in_glue(self: Any, x: Tensor) -> Tensor:
    early, gain = self.layers[0](x), torch.sigmoid(self.gain)
    return self.run(x) * gain + early


@trap(prepare=lambda m: _gained(m) or _frozen(m), later=lambda m: m.requires_grad_())
def thawed_later_in_glue(self: Any, x: Tensor) -> Tensor:
    early, gain = self.layers[0](x), torch.sigmoid(self.gain)
    return self.run(x) * gain + early


@trap()
def checkpointed(self: Any, x: Tensor) -> Tensor:
    return self.run(checkpoint(self.layers[0], x, use_reentrant=False))


@trap()
def checkpointed_function(self: Any, x: Tensor) -> Tensor:
    return checkpoint(functools.partial(self.run), x, use_reentrant=False)


@trap()
def reversed_gradient(self: Any, x: Tensor) -> Tensor:
    y = self.layers[0](x)
    return self.run(2 * y.detach() - y)


@torch.library.custom_op("autopipe_traps::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


twice.register_fake(lambda x: torch.empty_like(x))
twice.register_autograd(lambda ctx, g: g * 3)


@trap()
def custom_operator(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.ops.autopipe_traps.twice(self.layers[0](x)) + twice(x))


class Energy(nn.Module):
    """Forces from a submodule that takes the derivative itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            return torch.autograd.grad(self.net(y).sum(), y, create_graph=True)[0]


@trap(energy=Energy)
def forces_of_a_submodule(self: Any, x: Tensor) -> Tensor:
    return self.run(x + self.energy(x))


@trap(around=torch.no_grad)
def tangent_by_two_derivatives(self: Any, x: Tensor) -> Tensor:
    h = self.layers[0](x)
    tangent = torch.autograd.functional.jvp(lambda z: z.sin(), h, torch.ones_like(h), create_graph=True)[1]
    return self.run(tangent)


@trap()
def vmap_over_a_layer(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.vmap(lambda row: self.layers[0](row).sin())(x))


@trap()
def grad_of_each_row_through_a_layer(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.vmap(torch.func.grad(lambda z: self.layers[0](z).sin().sum()))(x))


@trap()
def jacobian_through_a_layer(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.func.jacrev(lambda z: self.layers[0](z).sin().sum((0, 1)))(x).sum(0))


@trap()
def forward_jacobian_through_a_layer(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.func.jacfwd(lambda z: self.layers[0](z).sin().sum((0, 1)))(x).sum(0))


@trap()
def hessian_of_each_place_through_a_layer(self: Any, x: Tensor) -> Tensor:
    of_one = torch.func.hessian(lambda z: self.layers[0](z).sin().sum())
    return self.run(torch.vmap(torch.vmap(of_one))(x).sum(-1))


@trap()
def jacobian_of_a_function(self: Any, x: Tensor) -> Tensor:
    return self.run(x + torch.vmap(torch.vmap(torch.func.jacrev(torch.sin)))(x).sum(-1))


@trap("refused")
def linear_part_of_the_loss(self: Any, x: Tensor) -> Tensor:
    value, part = torch.func.linearize(lambda z: z.sin() * 2, self.run(x))
    return value + part(torch.ones_like(value))
