"""Forwards that set modules to a mode, and leave them in it."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .registry import WIDTH, Normed, trap


@trap(part=Normed)
def part_in_eval_at_last(self: Any, x: Tensor) -> Tensor:
    self.part.train()
    y = self.part(x)
    self.part.eval()
    return self.run(y)


@trap("refused", part=Normed)
def part_in_eval_from_the_first_call(self: Any, x: Tensor) -> Tensor:
    y = self.part(x)
    self.part.eval()
    return self.run(y)


@trap("refused", part=Normed)
def own_code_in_eval_from_the_first_call(self: Any, x: Tensor) -> Tensor:
    y = self.run(F.dropout(x, 0.5, self.part.training))
    self.part.eval()
    return y


@trap("refused")
def in_eval_from_the_first_call(self: Any, x: Tensor) -> Tensor:
    y = self.run(F.dropout(x, 0.5, self.training))
    self.eval()
    return y


@trap(part=Normed, later=lambda m: m.part.drop.eval())
def norm_in_eval_and_dropout_later(self: Any, x: Tensor) -> Tensor:
    self.part.norm.eval()
    return self.run(self.part(x))


@trap(part=Normed, later=lambda m: m.part.eval())
def part_that_always_trains(self: Any, x: Tensor) -> Tensor:
    self.part.train()
    return self.run(self.part(x))


class Following(nn.Module):
    """A dropout of its own code, as far as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, p: float) -> Tensor:
        return self.last(F.dropout(self.first(x), p, self.training) + p)


@trap(part=Following)
def open_part_in_eval(self: Any, x: Tensor) -> Tensor:
    self.part.eval()
    return self.run(self.part(x, 0.5 if self.training else 0.1))


def _freeze(layers: nn.Module, frozen: bool) -> None:
    for p in layers.parameters():
        p.requires_grad = not frozen


@trap()
def layers_frozen_for_a_loss(self: Any, x: Tensor) -> Any:
    critic = self.layers[3](self.run(x)).pow(2).mean()
    action = self.layers[0](x)
    _freeze(self.layers[3], True)
    actor = -self.layers[3](action).mean()
    _freeze(self.layers[3], False)
    return critic + actor, self.layers[3](action)


@trap(part=Normed)
def part_frozen_in_eval(self: Any, x: Tensor) -> Tensor:
    y = self.part(x)
    self.part.eval().requires_grad_(False)
    y = self.part(y)
    self.part.train(self.training).requires_grad_(True)
    return self.run(y)


@trap()
def weight_frozen_where_it_is_used(self: Any, x: Tensor) -> Tensor:
    w = self.layers[1].weight
    y = F.linear(x, w)
    w.requires_grad_(False)
    y = F.linear(y, w) + (0 if w.requires_grad else 1)
    w.requires_grad_(True)
    return self.run(F.linear(y, w))


@trap("refused")
def layer_left_frozen(self: Any, x: Tensor) -> Tensor:
    y = self.run(x)
    _freeze(self.layers[3], True)
    return y


@trap("refused", prepare=lambda m: m.layers[3].requires_grad_(False))
def layer_trained_for_a_part(self: Any, x: Tensor) -> Tensor:
    _freeze(self.layers[3], False)
    y = self.run(x)
    _freeze(self.layers[3], True)
    return y


@trap(prepare=lambda m: m.layers[3].requires_grad_(False))
def frozen_layer_frozen_once_more(self: Any, x: Tensor) -> Tensor:
    _freeze(self.layers[3], True)
    return self.run(x)
