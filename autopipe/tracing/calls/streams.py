"""Which functions draw random numbers, and whose draw a call of one is: the module's whose forward makes it.

Counted so, a draw has the same place whether the recording shows it or a leaf hides it. Seeding by that place
is left to ``stages.rng``.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...torch_private import FUNCTION_HOMES

__all__ = ["DRAWING", "Stream", "drawer"]

_NAMES = (
    "alpha_dropout", "alpha_dropout_", "bernoulli", "bernoulli_", "binomial", "cauchy_", "dropout",
    "dropout_", "dropout1d", "dropout2d", "dropout3d", "exponential_", "feature_alpha_dropout",
    "feature_alpha_dropout_", "feature_dropout", "feature_dropout_", "fractional_max_pool2d",
    "fractional_max_pool2d_with_indices", "fractional_max_pool3d", "fractional_max_pool3d_with_indices",
    "geometric_", "gru", "gumbel_softmax", "log_normal_", "lstm", "multi_head_attention_forward",
    "multinomial", "native_dropout", "normal", "normal_", "poisson", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "random_", "randperm", "rnn_relu", "rnn_tanh", "rrelu",
    "rrelu_", "scaled_dot_product_attention", "uniform_", "_sample_dirichlet", "_standard_gamma",
)  # fmt: skip


def _named() -> Iterator[Callable[..., Any]]:
    for place in (*FUNCTION_HOMES, F, torch.nn.init):
        yield from (getattr(place, name) for name in _NAMES if callable(getattr(place, name, None)))


DRAWING = frozenset(_named())
"""Torch's functions that draw, or may; a call counts whether it does or not."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """Where the random numbers of one op come from.

    ``owner`` is whose draws they are where no module inside the op makes them, ``start`` how many ops it had
    that draw before, ``counts`` how many calls of :data:`DRAWING` it and the modules inside had made. One
    that ``is_outside`` draws from Python's or numpy's generator, too.
    """

    owner: str
    start: int = 0
    counts: tuple[tuple[str, int], ...] = ()
    is_outside: bool = False


def drawer(paths: Mapping[int, str], outermost: type[nn.Module] | None = None) -> str | None:
    """The path, by ids of modules, of that whose own code runs now; None in that of an ``outermost``."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            if id(owner) in paths:
                return paths[id(owner)]
            if outermost is not None and isinstance(owner, outermost):
                return None
        frame = frame.f_back
    return None
