"""What a module is, so that layers of a stack are told to be alike: class, attributes, weights.

What follows from it is left to ``sharing`` and to the op graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from ..members import modules_in, parameters_in, submodule
from .call import Call
from .functions import tensors

__all__ = ["Kind", "describe", "dtype_name", "is_own_number", "kind_of", "own_numbers"]


_OWN = frozenset({"id", "idx"})


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """What a module is: class and plain attributes of all inside, weights, and whether hooks change it."""

    configuration: str
    weights: str
    is_hooked: bool


def kind_of(model: nn.Module, path: str) -> Kind:
    """The kind of the module at ``path``; equal in layers of a stack."""
    module = submodule(model, path)
    weights = str([(tuple(p.shape), p.dtype, p.requires_grad) for _, p in parameters_in(module)])
    inside = modules_in(module)
    is_hooked = any(m._forward_hooks or m._forward_pre_hooks for _, m in inside)
    return Kind(_configuration(inside, path), weights, is_hooked)


def describe(value: Any) -> Any:
    """What a cost can depend on in an argument, equal in every process: no identities, no addresses."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Call) and isinstance(value.value, torch.device):
        return "the model's device"  # each rank may have another
    if isinstance(value, Call):
        return [
            (tuple(t.shape), dtype_name(t.dtype), t.requires_grad) for t in tensors(value.value)
        ] or describe(value.value)
    if isinstance(value, slice):
        return "slice", *map(describe, (value.start, value.stop, value.step))
    if isinstance(value, (tuple, list)):
        return [describe(v) for v in value]
    if isinstance(value, dict):
        return {k: describe(value[k]) for k in sorted(value, key=str)}
    return type(value).__qualname__


_PLAIN = frozenset({
    type(None), bool, int, float, complex, str, type(...),
    torch.dtype, torch.layout, torch.device, torch.memory_format,
})  # fmt: skip


def _configuration(named: Iterable[tuple[str, nn.Module]], path: str) -> str:
    """Class and plain attributes of a module and all ``named`` inside; a layer's own number left out."""
    numbers = own_numbers(path)
    parts = []
    for name, inner in named:
        plain = {
            k: describe(v)
            for k, v in vars(inner).items()
            if not k.startswith("_")
            and issubclass(type(v), (int, float, str, tuple))
            and k != "training"
            and not is_own_number(k, v, numbers)
        }
        parts.append(f"{name}:{type(inner).__module__}.{type(inner).__qualname__}{sorted(plain.items())}")
    return ";".join(parts)


def own_numbers(path: str) -> frozenset[int]:
    """The numbers in a module's path, which say which of several layers it is in."""
    return frozenset(int(part) for part in path.split(".") if part.isdecimal())


def is_own_number(name: str, value: Any, numbers: Collection[int]) -> bool:
    """Whether an attribute, such as ``layer_idx``, says which a layer is, of those ``numbers``."""
    return type(value) is int and value in numbers and not _OWN.isdisjoint(name.split("_"))


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype, such as ``float32``."""
    return str(dtype).removeprefix("torch.")
