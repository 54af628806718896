"""Hooks of all kinds on the model itself, on what it is opened into and on its layers; parametrizations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from .registry import WIDTH, Net, trap


class Block(nn.Module):
    """Two layers, so that containers of it are opened."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Encoder(nn.Module):
    """A container that is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        for block in self.blocks:
            x = x + block(x) * scale
        return x


class Deep(Net):
    """An opened encoder before the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.hook()

    def hook(self) -> None:
        """What the trap adds."""

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.encoder(x, scale=0.5))


def deep(hook: Any, outcome: Any = "right", **how: Any) -> Any:
    """A trap of :class:`Deep` with hooks."""
    trap(outcome, **how)(type(hook.__name__, (Deep,), {"hook": hook, "__module__": __name__}))
    return hook


@deep
def forward_hook_on_root(self: Any) -> None:
    self.register_forward_hook(lambda m, a, out: out * 2)


@deep
def forward_hook_on_encoder(self: Any) -> None:
    self.encoder.register_forward_hook(lambda m, a, out: out * 2)


@deep
def pre_hook_with_keywords(self: Any) -> None:
    self.encoder.register_forward_pre_hook(
        lambda m, a, k: ((a[0] * 2,), {"scale": k["scale"] * 3}), with_kwargs=True
    )


@deep
def forward_hook_on_block(self: Any) -> None:
    self.encoder.blocks[1].register_forward_hook(lambda m, a, out: out.sin())


def _halved(module: nn.Module, into: Any, out: Any) -> Any:
    return tuple(g if g is None else g * 0.5 for g in into)


def _doubled(module: nn.Module, out: Any) -> Any:
    return tuple(g * 2 for g in out)


def backward_hook_on_root(self: Any) -> None:
    self.register_full_backward_hook(_halved)


def backward_pre_hook_on_root(self: Any) -> None:
    self.register_full_backward_pre_hook(_doubled)


deep(backward_hook_on_root, "safe")
deep(backward_pre_hook_on_root, "safe")


@deep
def backward_hook_on_encoder(self: Any) -> None:
    self.encoder.register_full_backward_hook(_halved)


@deep
def backward_pre_hook_on_encoder(self: Any) -> None:
    self.encoder.register_full_backward_pre_hook(_doubled)


@deep
def backward_hook_on_block(self: Any) -> None:
    self.encoder.blocks[0].register_full_backward_hook(_halved)
    self.layers[2].register_full_backward_pre_hook(_doubled)


@deep
def hook_on_a_parameter(self: Any) -> None:
    self.layers[0].weight.register_hook(lambda g: g * 3)


def hook_that_leaves(self: Any) -> None:
    handle = self.encoder.register_forward_hook(lambda m, a, out: (handle.remove(), out * 2)[1])


deep(hook_that_leaves, "safe")


def hook_that_counts(self: Any) -> None:
    seen: list[int] = []
    self.encoder.register_forward_hook(lambda m, a, out: (seen.append(1), out * len(seen))[1])


deep(hook_that_counts, "safe")


def hook_on_encoder_later(self: Any) -> None:
    pass


deep(
    hook_on_encoder_later,
    later=lambda m: m.encoder.register_forward_hook(lambda m, a, out: out * 2),
)


def hook_on_root_later(self: Any) -> None:
    pass


deep(hook_on_root_later, later=lambda m: m.register_forward_hook(lambda m, a, out: out * 2))


def backward_hook_on_encoder_later(self: Any) -> None:
    pass


deep(
    backward_hook_on_encoder_later,
    "safe",
    later=lambda m: m.encoder.register_full_backward_hook(_halved),
)


def hook_on_block_later(self: Any) -> None:
    pass


deep(hook_on_block_later, later=lambda m: m.encoder.blocks[0].register_forward_hook(lambda m, a, o: o * 2))


def hook_removed_later(self: Any) -> None:
    self.handle = self.encoder.register_forward_hook(lambda m, a, out: out * 2)


deep(hook_removed_later, later=lambda m: m.handle.remove())


@deep
def hook_on_a_tensor_in_a_hook(self: Any) -> None:
    def hook(module: nn.Module, args: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda g: g * 0.5)

    self.encoder.register_forward_hook(hook)


@trap(prepare=lambda m: parametrizations.weight_norm(m.layers[0]))
def weight_norm(self: Any, x: Tensor) -> Tensor:
    return self.run(x)


@trap(prepare=lambda m: torch.nn.utils.weight_norm(m.layers[0]))
def weight_norm_of_old(self: Any, x: Tensor) -> Tensor:
    return self.run(x)


@trap(prepare=lambda m: torch.nn.utils.spectral_norm(m.layers[0]))
def spectral_norm_of_old(self: Any, x: Tensor) -> Tensor:
    return self.run(x)


@trap("safe", prepare=lambda m: parametrizations.spectral_norm(m.layers[0]))
def spectral_norm_in_glue(self: Any, x: Tensor) -> Tensor:
    return self.run(torch.nn.functional.linear(x, self.layers[0].weight))


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.T


@trap("safe", prepare=lambda m: parametrize.register_parametrization(m.layers[0], "weight", Symmetric()))
def parametrized_in_glue(self: Any, x: Tensor) -> Tensor:
    return self.run(x @ self.layers[0].weight)


@trap("safe", prepare=lambda m: parametrize.register_parametrization(m.layers[0], "weight", Symmetric()))
def cached_parametrization(self: Any, x: Tensor) -> Tensor:
    with parametrize.cached():
        return self.layers[0](self.layers[0](x))


def halved(module: nn.Module, args: Any) -> Any:
    return (args[0] / 2, *args[1:])


@trap(prepare=lambda m: m.register_forward_pre_hook(halved))
def hook_on_what_is_given_by_position(self: Any, x: Tensor) -> Tensor:
    return self.run(x)


def hooked(part: nn.Module) -> None:
    part.register_forward_hook(lambda module, args, out: out * 2)


@trap(later=lambda m: hooked(m.layers[0]))
def hook_later_on_a_layer_run_with_other_weights(self: Any, x: Tensor) -> Tensor:
    weights = {n: p * 0.5 for n, p in self.layers[0].named_parameters()}
    return self.run(torch.func.functional_call(self.layers[0], weights, (x,)))


@trap(part=Block, later=lambda m: hooked(m.part))
def hook_later_on_a_block_run_with_other_weights(self: Any, x: Tensor) -> Tensor:
    weights = {n: p * 0.5 for n, p in self.part.named_parameters()}
    return self.run(torch.func.functional_call(self.part, weights, (x,)) + self.part(x))


@trap(part=Block, later=lambda m: hooked(m.part))
def hook_later_on_a_block_run_with_one_other_weight(self: Any, x: Tensor) -> Tensor:
    weights = {"b.weight": self.part.b.weight * 0.5}
    return self.run(torch.func.functional_call(self.part, weights, (x,)) + self.part(x))
