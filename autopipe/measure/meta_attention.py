"""Makes attention and dropout run on meta tensors as the fused kernels that a device would choose.

Left alone, meta tensors take the unfused forms: of attention with the matrix of all pairs, which no such
device computes or keeps, of dropout with a mask of the values' dtype, where a GPU keeps a byte of each.
What the kernels then cost is left to ``estimate``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["FusedAttention"]

_FLASH_HEAD = 256
"""Largest head that the flash kernel takes."""

_aten = torch.ops.aten
_ATTENTION, _DROPOUT = F.scaled_dot_product_attention, F.dropout


class FusedAttention(TorchFunctionMode):
    """While active, attention on meta tensors goes to the kernel that PyTorch picks on a kind of device.

    On ``"cuda"``: flash for half precision without a mask and heads up to 256, else memory-efficient; dropout
    is one kernel too. On ``"cpu"``: its flash kernel, where nothing is dropped out. Anything else stays as it
    is. The rules are those of ``sdp_utils.cpp``, ``sdp_utils_cpp.cpp`` and ``Dropout.cpp`` in PyTorch, less
    what hangs on alignment and age of the device. ``seen`` has the kernels of attention that were chosen.

    Within torch's own functions, as ``nn.MultiheadAttention`` runs one, no mode is asked: while this one is
    active they find what asks it in the place of either.
    """

    def __init__(self, kind: str, autocast: torch.dtype | None = None):
        super().__init__()
        self.kind, self.autocast = kind, autocast
        self.seen: set[str] = set()
        self.replaced: tuple[Callable[..., Any], ...] = ()

    def __enter__(self) -> Self:
        # what users put in the place of either stays
        self.replaced = tuple(f for f in (_ATTENTION, _DROPOUT) if getattr(F, f.__name__) is f)
        for function in self.replaced:
            setattr(F, function.__name__, functools.partial(self._asked, function))
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        for function in self.replaced:
            setattr(F, function.__name__, function)
        super().__exit__(*raised)

    def _asked(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return self.__torch_function__(function, (), args, kwargs)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _ATTENTION:
            found = self._fused(*args, **(kwargs or {}))
            if found is not None:
                return found
        if func is _DROPOUT and self.kind == "cuda":
            return _dropped(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | None:
        if not query.is_meta or query.dim() != 4 or not query.is_floating_point():
            return None
        if self.autocast is not None:
            query, key, value = (t.to(self.autocast) for t in (query, key, value))
        if enable_gqa:
            n = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(n, 1), value.repeat_interleave(n, 1)
        is_square = query.shape[-1] == key.shape[-1] == value.shape[-1]
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        if self.kind == "cpu" and is_square and not dropout_p:
            self.seen.add("flash")
            return _aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale
            )[0]
        if self.kind == "cuda":
            half = query.dtype in (torch.float16, torch.bfloat16)
            if half and bias is None and is_square and query.shape[-1] <= _FLASH_HEAD:
                self.seen.add("flash")
                return _aten._scaled_dot_product_flash_attention(
                    query, key, value, dropout_p, is_causal, scale=scale
                )[0]
            if query.dtype != torch.float64:
                self.seen.add("memory-efficient")
                return _aten._scaled_dot_product_efficient_attention(
                    query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
                )[0]
        return None


def _dropped(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """As a GPU drops out: in one kernel, where it does and does not write into its input."""
    if input.is_meta and training and not inplace and 0 < p < 1:
        return torch.native_dropout(input, p, True)[0]
    return _DROPOUT(input, p, training, inplace)


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as what is added to the scores, read where it lies for every head."""
    added = torch.zeros_like(mask, dtype=query.dtype) if mask.dtype == torch.bool else mask.to(query.dtype)
    return added.expand(*query.shape[:2], query.shape[2], key.shape[2])
