"""Tensors of a model that refuse what is asked of any: some of users' classes, and nested ones."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from ..calls.functions import tensors
from ..inputs.structure import flatten
from ..members import OF_ALL, modules_in

__all__ = ["check_answers"]

_ATTRIBUTES = ("shape", "dtype", "device", "layout", "requires_grad", "is_meta", "is_nested", "_version")
_METHODS = ("numel", "dim", "is_floating_point", "is_complex", "__hash__")
_PLAIN = frozenset({type(None), bool, int, float, str})
_TENSORS = frozenset({torch.Tensor, nn.Parameter})
_COPIED = 1 << 16
"""Of tensors with at most so many elements a copy is asked for too."""


def check_answers(model: nn.Module, *given: Any) -> None:
    """Raise :class:`InputError` for a tensor of the model, or among what it is given, that refuses to tell
    what it is, or to be copied, and for nested ones of the model that cannot be compared."""
    held = [*_held(model)]
    for name, tensor in held:
        if tensor.is_nested and tensor.layout is torch.strided:
            raise InputError(
                f"the model's {name} is a nested tensor in the strided layout, whose values cannot be held "
                "against later ones; hold its rows in a list, or as one tensor filled up to one length "
                "(to_padded_tensor)"
            )
    found = ((f"the model's {name}", t) for name, t in _own(held))
    arguments = (("an argument", t) for t in flatten(given)[0] if isinstance(t, torch.Tensor))
    for shown, tensor in (*found, *_own(arguments)):
        for name, ask in _questions():
            try:
                ask(tensor)
            except Exception as error:  # whatever a class of others raises
                raise InputError(
                    f"{shown} is a {type(tensor).__name__}, which refuses {name} ({error}); a pipeline asks "
                    "that of every tensor: hold a plain one (tensor.as_subclass(torch.Tensor)), and make it "
                    f"a {type(tensor).__name__} within a forward"
                ) from error


def _held(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers, and tensors in attributes or in containers there, each by a name."""
    for path, module in modules_in(model):
        for name, value in (*module._parameters.items(), *module._buffers.items(), *vars(module).items()):
            if type(value) in _TENSORS:
                yield f"{path}.{name}".lstrip("."), value
            elif type(value) not in _PLAIN and name not in OF_ALL:
                yield from ((f"{path}.{name}".lstrip("."), t) for t in tensors(value))


def _own(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of classes that are not torch's."""
    others = ((name, t) for name, t in named if type(t) not in _TENSORS)
    return ((name, t) for name, t in others if type(t).__module__.partition(".")[0] != "torch")


def _questions() -> Iterator[tuple[str, Callable[[torch.Tensor], Any]]]:
    yield from ((name, operator.attrgetter(name)) for name in _ATTRIBUTES)
    yield from ((name, operator.methodcaller(name)) for name in _METHODS)
    yield "stride", lambda tensor: tensor.layout is not torch.strided or tensor.stride()
    yield "detach", lambda tensor: tensor.detach()
    yield "clone", lambda tensor: tensor.numel() > _COPIED or tensor.is_meta or tensor.detach().clone()
