"""What a model does on given inputs, and whether two such observations are equal.

Works on anything that is called like the model: the model, its capture, its stages, an exported program.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "Observation",
    "beside",
    "difference",
    "fingerprint",
    "flat",
    "leaves",
    "observe",
    "seed",
    "seed_torch",
]

CACHES = (
    "cache",
    "past_key_values",
    "cache_params",
    "mems",
    "past_buckets_states",
    "state",
    "decoder_past_key_values",
)
"""Outputs that exist for generation only; training captures leave them out."""


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """Output tensors by path, gradients by parameter name, buffers after the call."""

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


def seed_torch(value: int) -> None:
    """As ``torch.manual_seed``, which with the CPU alone spends its time on noting where it was called."""
    (torch if torch.accelerator.is_available() else torch.default_generator).manual_seed(value)


def seed(value: int = 0) -> None:
    """Seeds every generator that a model may draw from."""
    import numpy as np

    seed_torch(value)
    random.seed(value)
    np.random.seed(value)  # the generator that transformers' models draw from


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """(path, tensor) of every tensor in a nested output; caches are left out."""
    for name, held in beside(value).items():
        yield from leaves(held, f"{path}.{name}")
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key not in CACHES:
                yield from leaves(item, f"{path}.{key}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}.{index}")


def beside(value: Any) -> dict[str, Any]:
    """What a tensor, or what else holds items, has in attributes that are neither fields nor items again."""
    if not (type(value) is Tensor or isinstance(value, (Mapping, list, tuple))):
        return {}
    held = getattr(value, "__dict__", {})
    known = getattr(value, "__dataclass_fields__", ("data",))
    return {} if held is value else {n: v for n, v in held.items() if n not in known}


def observe(model: nn.Module, call: Callable[[], Any], *, backward: bool = True) -> Observation:
    """Calls ``call`` with fixed seeds, sends a gradient back from every output, and puts ``model`` back.

    Gradients and buffers are those of ``model``, whatever ``call`` runs.
    """
    kept = {n: b.detach().clone() for n, b in model.named_buffers()}
    model.zero_grad(set_to_none=True)
    seed()
    outputs = dict(leaves(call()))
    if backward:
        _backward(outputs)
    gradients = {n: p.grad for n, p in model.named_parameters()}
    buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in kept and buffer.shape == kept[name].shape:
                buffer.copy_(kept[name])
    return Observation({p: t.detach() for p, t in outputs.items()}, gradients, buffers)


def _backward(outputs: Mapping[str, Tensor]) -> None:
    """From a fixed random projection of every differentiable output, so that none can be wrong unseen."""
    generator = torch.Generator().manual_seed(1)
    roots, weights = [], []
    for tensor in outputs.values():
        if tensor.requires_grad:
            roots.append(tensor)
            real = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
            weights.append(real.to(tensor.dtype).to(tensor.device))
    if roots:
        torch.autograd.backward(roots, weights)


def difference(expected: Observation, got: Observation, rtol: float = 1e-4) -> str:
    """The first difference between two observations in words, or "" when they are equal.

    Tensors are equal when no element differs by more than ``rtol`` of the largest element, plus 1e-6.
    """
    for kind in ("outputs", "gradients", "buffers"):
        a, b = getattr(expected, kind), getattr(got, kind)
        if list(a) != list(b) and kind == "outputs":
            return f"outputs are {list(b)[:8]}, the model gives {list(a)[:8]}"
        for name in a:
            problem = _tensor_difference(a[name], b.get(name), rtol)
            if problem:
                return f"{kind[:-1]} {name}: {problem}"
    return ""


def flat(observation: Observation) -> Observation:
    """The same with outputs known by their order alone."""
    outputs = {str(i): t for i, t in enumerate(observation.outputs.values())}
    return dataclasses.replace(observation, outputs=outputs)


def _tensor_difference(a: Tensor | None, b: Tensor | None, rtol: float) -> str:
    if a is None or b is None:
        return (
            ""
            if a is b
            else f"{'none' if b is None else 'some'}, the model has {'none' if a is None else 'some'}"
        )
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{tuple(b.shape)} {b.dtype}, the model gives {tuple(a.shape)} {a.dtype}"
    if a.numel() == 0 or torch.equal(a, b):
        return ""
    if not (a.is_floating_point() or a.is_complex()):
        return f"{int((a != b).sum())} of {a.numel()} elements differ"
    x, y = (t.detach().to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b))
    is_finite = torch.isfinite(x)
    if not torch.equal(is_finite, torch.isfinite(y)):
        return "other elements are not finite"
    scale = float(x[is_finite].abs().max()) if is_finite.any() else 0.0
    error = float((x - y)[is_finite].abs().max()) if is_finite.any() else 0.0
    return "" if error <= 1e-6 + rtol * scale else f"off by {error:.1e} where the largest is {scale:.1e}"


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that capturing it must leave alone."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "modes": {n: m.training for n, m in model.named_modules()},
        "hooks": {n: [len(getattr(m, h)) for h in hooks] for n, m in model.named_modules()},
        "attributes": {n: sorted(vars(m)) for n, m in model.named_modules()},
        "parameters": {n: (id(p), _total(p), p.requires_grad) for n, p in model.named_parameters()},
        "gradients": {n: p.grad is None for n, p in model.named_parameters()},
        "buffers": {n: _total(b) for n, b in model.named_buffers()},
        "random state": torch.get_rng_state().tolist(),
    }


def _total(tensor: Tensor) -> float:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return float(real.detach().double().sum())
