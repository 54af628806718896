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
