"""Splits for tests that are about neither costs nor balance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

import autopipe

__all__ = ["split_by_layers"]


def split_by_layers(
    model: nn.Module,
    n_stages: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> autopipe.Pipe:
    """The model in stages of as many leaf modules, as it was captured: none is opened, nor planned again.

    A split that balances costs captures, prices and plans some models three times.
    """
    return autopipe.split(model, n_stages, args, kwargs, balance="uniform", costs="estimated", **options)
