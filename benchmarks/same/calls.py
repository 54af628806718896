"""The attention calls that a model makes, to hold a pipe's against the model's own.

Timing steps is left to ``paired``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["Call", "attention_calls"]


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A call of attention: its mask's shape or None, whether it is causal, shapes, grouped heads."""

    mask: tuple[int, ...] | None
    is_causal: bool
    query: tuple[int, ...]
    key: tuple[int, ...]
    is_grouped: bool

    @property
    def scores(self) -> tuple[int, int]:
        """(positions of the queries, of the keys)."""
        return self.query[-2], self.key[-2]


class _Attention(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Call] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | kwargs
            mask = given.get("attn_mask")
            self.seen.append(
                Call(
                    mask=None if mask is None else tuple(mask.shape),
                    is_causal=bool(given.get("is_causal", False)),
                    query=tuple(given["query"].shape),
                    key=tuple(given["key"].shape),
                    is_grouped=bool(given.get("enable_gqa", False)),
                )
            )
        return func(*args, **kwargs)


@contextlib.contextmanager
def attention_calls() -> Iterator[list[Call]]:
    """Lists each call made meanwhile."""
    with torch.no_grad(), _Attention() as mode:
        yield mode.seen
