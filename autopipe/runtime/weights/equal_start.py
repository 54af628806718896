"""Whether ranks begin with the same weights: stages of differently initialised models make no model.

Ranks that train already are left alone: each has only its own stages' weights then.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import InputError
from ...stages import Stage
from .stale import StaleTensor

if TYPE_CHECKING:
    from ...tracing import Capture

__all__ = ["check_weights", "fingerprints"]

LOOKED_AT = 16
"""How many values of a parameter are looked at: other seeds and other checkpoints differ in nearly all."""


@torch.no_grad()
def fingerprints(capture: Capture, stages: Sequence[Stage]) -> dict[str, int]:
    """A number for each stage, of some values of each of its weights, where all of those are here."""
    found = {}
    for stage in stages:
        weights = {n: t for n, t in stage.state_dict(keep_vars=True).items() if n in capture.ops.parameter}
        if weights and all(_is_here(t, capture.ops.parameter[n].shape) for n, t in weights.items()):
            number = 0
            for tensor in weights.values():
                number = zlib.crc32(_some(tensor).cpu().numpy().tobytes(), number)
            found[f"{next(iter(weights))} to {next(reversed(weights))}"] = number
    return found


def _is_here(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether this process has the values: not where they were released, sharded, never made or are old."""
    is_plain = tensor.layout is torch.strided and not hasattr(tensor, "to_local") and not tensor.is_meta
    return is_plain and tensor.__class__ is not StaleTensor and tuple(tensor.shape) == shape


def _some(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous() and tensor.ndim > 1:
        tensor = tensor[(0,) * (tensor.ndim - 1)]
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // LOOKED_AT)][:LOOKED_AT].contiguous().view(torch.uint8)


def check_weights(cards: Sequence[Mapping[str, Any]]) -> None:
    """Raise :class:`InputError` on every rank where two ranks have other values of the same weights."""
    first: dict[str, tuple[int, int]] = {}
    for rank, card in enumerate(cards):
        other = []
        for name, value in card["own weights"].items():
            holder, expected = first.setdefault(name, (rank, value))
            if value != expected:
                other.append((name, holder))
        if other:
            raise InputError(
                f"ranks begin with different weights: {other[0][0]} differ between rank {other[0][1]} and "
                f"rank {rank}, so the stages would be parts of several models; write torch.manual_seed(0) "
                "before the model is made, or load the same checkpoint into it on every rank"
            )
