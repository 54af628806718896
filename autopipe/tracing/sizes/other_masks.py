"""Other data for a model's integer inputs: masks with and without holes, labels that are left out.

Which of them are wanted is left to ``forms``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

__all__ = ["LEFT_OUT", "witnesses"]

LEFT_OUT = -100
"""What torch's losses ignore as a label."""


def witnesses(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """The inputs with one of them changed, of the same sizes and dtypes."""
    for name, tensor in tensors.items():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or not tensor.numel():
            continue
        for other in _others(tensor):
            yield {**tensors, name: other}


def _others(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield torch.ones_like(tensor)
    if tensor.dim():
        half = tensor.shape[-1] // 2
        for holes in (slice(half, None), slice(None, half)):
            holed = tensor.clone()
            holed[(0,) * (tensor.dim() - 1)][holes] = 0
            yield holed
    yield torch.zeros_like(tensor)
    if tensor.dtype == torch.int64:
        if tensor.dim():
            holed = tensor.clone()
            holed[..., : tensor.shape[-1] // 2] = LEFT_OUT
            yield holed
        yield torch.full_like(tensor, LEFT_OUT)
