"""Numbers that Python reads out of tensors, counts and norms, and that arithmetic and torch alone take."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor

from .registry import trap
from .values import with_lengths

LOG = logging.getLogger(__name__)


@trap(inputs=with_lengths)
def mean_by_a_count_as_a_float(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    mask = torch.arange(x.size(1))[None] < lengths[:, None]
    return (self.run(x) * mask[..., None]).sum((0, 1)) / max(float(mask.sum()), 1.0)


@trap()
def scaled_by_the_largest(self: Any, x: Tensor) -> Tensor:
    return self.run(x / (x.detach().abs().max().item() + 1e-6))


@trap()
def scaled_by_what_layers_make(self: Any, x: Tensor) -> Tensor:
    y = self.layers[0](x)
    return self.run(y / (1 + float(y.detach().norm())))


@trap()
def number_beside_a_result(self: Any, x: Tensor) -> Any:
    y = self.run(x)
    return y, (y > 0).sum().item(), float(y.detach().mean())


@trap()
def number_that_only_people_are_told(self: Any, x: Tensor) -> Tensor:
    LOG.debug("mean %s, largest %f", x.detach().mean().item(), float(x.detach().max()))
    return self.run(x)


@trap(scale=lambda: torch.full((), 1.5))
def number_in_a_tensor_of_the_model(self: Any, x: Tensor) -> Tensor:
    return self.run(x * self.scale.item())


@trap()
def roots_of_tensors_by_math(self: Any, x: Tensor) -> Tensor:
    return self.run(x / math.sqrt(x.detach().pow(2).sum()) + math.floor(x.detach().abs().max()))


@trap("safe")
def number_kept_for_the_next_call(self: Any, x: Tensor) -> Tensor:
    y = self.run(x) * getattr(self, "last", 1.0)
    self.last = float(x.detach().mean())
    return y
