"""Functions that torch is given with the layers they call: by autograd functions, hooks and other layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .registry import WIDTH, Net, buffers, trap


class Again(torch.autograd.Function):
    """Runs a function, and once more in the backward, which gives its layers their gradients."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            torch.autograd.backward(ctx.run(given), grads)
        return None, given.grad


class Called:
    """An object that calls a layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def scaled(layer: nn.Module, scale: float, x: Tensor) -> Tensor:
    return layer(x) * scale


@trap()
def again_by_a_layer(self: Any, x: Tensor) -> Tensor:
    return self.run(Again.apply(self.layers[1], self.layers[0](x)))


@trap()
def again_around_a_layer(self: Any, x: Tensor) -> Tensor:
    layer = self.layers[1]
    return self.run(Again.apply(lambda h: torch.tanh(layer(h)), self.layers[0](x)))


@trap(extra=lambda: nn.Linear(WIDTH, WIDTH))
def again_around_the_model(self: Any, x: Tensor) -> Tensor:
    return self.run(Again.apply(lambda h: torch.tanh(self.extra(h)), self.layers[0](x)))


@trap()
def again_by_a_partial_function(self: Any, x: Tensor) -> Tensor:
    return self.run(Again.apply(functools.partial(scaled, self.layers[1], 2.0), self.layers[0](x)))


@trap("safe")
def again_by_an_object(self: Any, x: Tensor) -> Tensor:
    return self.run(Again.apply(Called(self.layers[1]), self.layers[0](x)))


@trap()
class AgainByAMethod(Net):
    """The function is a method of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.extra(x)) + self.extra.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.run(Again.apply(self.inner, self.layers[0](x)))


class Block(nn.Module):
    """As many libraries write their own checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def inner(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        return Again.apply(self.inner, x)


@trap(blocks=lambda: nn.ModuleList(Block() for _ in range(2)))
def again_in_blocks(self: Any, x: Tensor) -> Tensor:
    x = self.layers[0](x)
    for block in self.blocks:
        x = block(x)
    return self.run(x)


@trap("refused", extra=lambda: nn.Linear(WIDTH, WIDTH))
def hook_around_a_layer(self: Any, x: Tensor) -> Tensor:
    y = self.layers[0](x)
    if y.requires_grad:
        y.register_hook(lambda g: g * self.extra.weight.mean())
    return self.run(y)


@trap(factor=lambda: 3.0)
def hook_around_a_number_of_the_model(self: Any, x: Tensor) -> Tensor:
    y = self.layers[0](x)
    if y.requires_grad:
        y.register_hook(lambda g: g * self.factor)
    return self.run(y)


class Told(torch.autograd.Function):
    """Writes into a buffer of the module that it is given how large gradients are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.module.largest.copy_(grads[0].abs().max())
        return grads[0], None


@trap("refused", prepare=lambda m: buffers(m, largest=torch.zeros(())))
def function_that_is_given_the_whole_model(self: Any, x: Tensor) -> Tensor:
    return self.run(Told.apply(self.layers[0](x), self))
