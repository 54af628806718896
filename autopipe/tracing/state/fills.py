"""Values that stand where others are masked out, as -inf or -1e9 in logits: beside them all else is alike.

What two tensors are allowed to differ by is left to those who compare them.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FILL", "without_fills"]

FILL = 1e4
"""From which size on a value may be one."""
_GAP = 1e3
"""How many times larger than all else it is then, unless it is the largest of its type."""


def without_fills(x: Tensor, y: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """Two floating-point tensors of one shape without NaN, but for the fills that both have in a place.

    Those are as large up to ``level`` of them; what is left is flat where there were any.
    """
    sizes = torch.maximum(x.abs(), y.abs())
    if not sizes.numel() or float(sizes.max()) < FILL:
        return x, y
    is_fill = (sizes >= FILL) & ((x - y).abs() <= level * sizes)
    fills, others = sizes[is_fill], sizes[~is_fill]
    if not fills.numel():
        return x, y
    least, most = float(fills.min()), float(others.max()) if others.numel() else 0.0
    is_apart = least >= torch.finfo(x.dtype).max or most * _GAP <= least
    return (x[~is_fill], y[~is_fill]) if is_apart else (x, y)
