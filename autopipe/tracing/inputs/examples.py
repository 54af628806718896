"""Example inputs for a model that tells what it takes.

Everything else about inputs is left to ``arguments``.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ...errors import InputError

__all__ = ["infer"]

_BATCH, _LENGTH, _SIDE = 2, 16, 32
_CONVOLUTIONS: tuple[tuple[type[nn.Module], int], ...] = ((nn.Conv1d, 1), (nn.Conv2d, 2), (nn.Conv3d, 3))


def infer(model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) to capture a model with, on its device, from what it says of itself.

    In order: a Lightning module's ``example_input_array``, a transformers model's ``dummy_inputs``, a timm
    model's ``default_cfg``, the first layer of an ``nn.Sequential``; a forward without arguments needs
    nothing. Raises :class:`InputError` that says what to pass otherwise.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    if not parameters:
        return (), {}
    for source in (_lightning, _transformers, _timm, _sequential):
        found = source(model)
        if found is not None:
            return found
    wanted = ", ".join(str(p) for p in parameters if p.default is p.empty) or "its forward's arguments"
    raise InputError(
        f"{type(model).__name__} does not tell its inputs; pass args=(...) or kwargs={{...}} "
        f"for forward({wanted})"
    )


Found = tuple[tuple[Any, ...], dict[str, Any]] | None


def _lightning(model: nn.Module) -> Found:
    example = getattr(model, "example_input_array", None)
    if isinstance(example, dict):
        return (), dict(example)
    if example is None:
        return None
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}


def _transformers(model: nn.Module) -> Found:
    try:
        dummy = getattr(model, "dummy_inputs", None)
    except (NotImplementedError, AttributeError, ValueError):
        return None
    if not isinstance(dummy, dict) or not dummy:
        return None
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    accepted = inspect.signature(model.forward).parameters
    place = next(model.parameters()).device
    out = {k: v.to(place) if isinstance(v, torch.Tensor) else v for k, v in dummy.items() if k in accepted}
    if (
        isinstance(vocabulary, int)
        and isinstance(out.get("input_ids"), torch.Tensor)
        and place.type != "meta"
    ):
        out["input_ids"] = out["input_ids"].remainder(vocabulary)
    return ((), out) if out else None


def _timm(model: nn.Module) -> Found:
    size = (getattr(model, "default_cfg", None) or {}).get("input_size")
    return None if size is None else ((_random(model, *size),), {})


def _sequential(model: nn.Module) -> Found:
    if not isinstance(model, nn.Sequential) or not len(model):
        return None
    first = model[0]
    while isinstance(first, nn.Sequential) and len(first):
        first = first[0]
    if isinstance(first, nn.Linear):
        return (_random(model, first.in_features),), {}
    if isinstance(first, nn.Embedding):
        return (
            torch.arange(_BATCH * _LENGTH, device="cpu")
            .remainder(first.num_embeddings)
            .view(_BATCH, _LENGTH),
        ), {}
    for cls, n_dims in _CONVOLUTIONS:
        if isinstance(first, cls):
            return (_random(model, first.in_channels, *[_SIDE] * n_dims),), {}  # type: ignore[arg-type]
    return None


def _random(model: nn.Module, *shape: int) -> torch.Tensor:
    held = next(model.parameters(), torch.empty(0, device="cpu"))
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_BATCH, *shape, generator=generator, device="cpu").to(held.device, held.dtype)
