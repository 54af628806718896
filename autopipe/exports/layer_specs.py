"""A model told as a list of layers, as DeepSpeed's ``PipelineModule`` takes it, made into a plain module.

Cutting it is left to ``api``; the way back is :meth:`autopipe.Pipe.to_layers`. DeepSpeed itself is not
needed: a spec is whatever has ``build`` and ``typename``. Source: deepspeed/runtime/pipe/module.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ..errors import InputError
from ..tracing.members import submodule

__all__ = ["LayerChain", "from_layer_specs"]


class LayerChain(nn.Module):
    """Layers one after another, each called with what the one before gave; several inputs are one tuple.

    Parameters have the names that DeepSpeed gives them: ``3.weight`` of the fourth layer,
    ``tied_modules.KEY.weight`` of tied ones.

    Attributes
    ----------
    loss_fn: of the ``PipelineModule`` it was made from, for :meth:`autopipe.Pipe.runtime`; else None.
    """

    def __init__(self, layers: Iterable[Any], loss_fn: Callable[[Any, Any], Any] | None = None) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self.tied_modules = nn.ModuleDict()
        self._tied: dict[str, Any] = {}
        self._calls = [self._added(i, layer) for i, layer in enumerate(layers)]
        if not self._calls:
            raise InputError("there are no layers; give a list with at least one")

    def _added(self, i: int, layer: Any) -> tuple[str, Any]:
        """(name of a submodule, function of it and a value or None), or a function without one."""
        if hasattr(layer, "build") and hasattr(layer, "typename"):
            key = getattr(layer, "key", None)
            if key is not None:
                return self._tied_name(i, str(key), layer), layer.forward_fn
            self.add_module(str(i), layer.build())
            return str(i), None
        if isinstance(layer, nn.Module):
            self.add_module(str(i), layer)
            return str(i), None
        if callable(layer):
            return "", layer
        raise InputError(
            f"layer {i} is a {type(layer).__name__}; it must be a LayerSpec, a module or a function of one "
            "value"
        )

    def _tied_name(self, i: int, key: str, spec: Any) -> str:
        """The submodule of a tied spec: the key's own, or one of its kind that shares the key's weights."""
        if key not in self.tied_modules:
            self.tied_modules[key], self._tied[key] = spec.build(), spec
            return f"tied_modules.{key}"
        first = self._tied[key]
        if first.typename is spec.typename:
            return f"tied_modules.{key}"
        made = spec.build()
        names = [spec.tied_weight_attr] if isinstance(spec.tied_weight_attr, str) else spec.tied_weight_attr
        for name in names:
            owner, _, leaf = name.rpartition(".")
            weight = operator.attrgetter(name)(self.tied_modules[key])
            setattr(submodule(made, owner), leaf, weight)
        self.add_module(str(i), made)
        return str(i)

    def forward(self, *inputs: Any) -> Any:
        """What the last layer gives."""
        value: Any = inputs[0] if len(inputs) == 1 else inputs
        for name, function in self._calls:
            if not name:
                value = function(value)
            elif function is None:
                value = submodule(self, name)(value)
            else:
                value = function(submodule(self, name), value)
        return value


def from_layer_specs(layers: Any, loss_fn: Callable[[Any, Any], Any] | None = None) -> LayerChain:
    """A module of DeepSpeed's list of ``LayerSpec``, ``TiedLayerSpec``, modules and functions.

    ``layers`` may also be a ``PipelineModule``, whose loss function is kept. Tied layers become one module,
    or where they are of several kinds share the weights that the spec names. Whatever the list's engine did
    beside (``seed_layers``, activation checkpoints) is left to :func:`autopipe.split`'s own options.

    Raises :class:`InputError` for a layer that is none of these.

    >>> import torch
    >>> chain = from_layer_specs([torch.nn.Linear(4, 4), torch.relu, torch.nn.Linear(4, 2)])
    >>> [name for name, _ in chain.named_parameters()], tuple(chain(torch.zeros(3, 4)).shape)
    (['0.weight', '0.bias', '2.weight', '2.bias'], (3, 2))
    """
    specs = getattr(layers, "_layer_specs", layers)
    own = getattr(layers, "loss_fn", None) if specs is not layers else None
    if isinstance(specs, nn.Sequential):
        specs = list(specs)
    if not isinstance(specs, Iterable):
        raise InputError(
            f"layers is a {type(layers).__name__}; give DeepSpeed's list of layers or its PipelineModule"
        )
    return LayerChain(specs, own if loss_fn is None else loss_fn)
