"""The attention calls that a model makes, to hold a pipe's against the model's own.

Timing steps is left to ``__main__``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["attention_calls"]


class _Attention(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            key = kwargs.get("key", args[1] if len(args) > 1 else None)
            self.seen.append(
                (
                    None if mask is None else tuple(mask.shape),
                    bool(kwargs.get("is_causal", False)),
                    None if key is None else tuple(key.shape),
                    bool(kwargs.get("enable_gqa", False)),
                )
            )
        return func(*args, **kwargs)


@contextlib.contextmanager
def attention_calls() -> Iterator[list[tuple[Any, ...]]]:
    """Lists (mask's shape or None, causal, keys' shape, grouped heads) of each call made meanwhile."""
    with torch.no_grad(), _Attention() as mode:
        yield mode.seen
