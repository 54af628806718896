"""The weights that a model's own code freezes for a part of its forward: ``p.requires_grad = False``.

Calling a leaf with such weights is left to ``calls.module_modes``, what glue makes of them to ``ledger``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..code.restart import CloseModule
from ..values.ledger import Ledger

__all__ = ["Frozen"]

_SETTERS = (torch.Tensor.requires_grad.__set__, torch.Tensor.requires_grad_)  # type: ignore[attr-defined]


class Frozen:
    """Which weights take gradients otherwise than they did when the model was called."""

    def __init__(self, ledger: Ledger) -> None:
        self._at, self._ledger = ledger.at, ledger
        self._begun: dict[int, bool] = {}

    def begin(self, modules: Iterable[nn.Module]) -> None:
        """The model of these modules is about to be called."""
        weights = (p for m in modules for p in m._parameters.values() if p is not None)
        with self._at.hushed:
            self._begun = {id(p): p.requires_grad for p in weights}

    def is_set(self, func: Callable[..., Any], args: Any) -> bool:
        """Whether a call says of a weight of the model whether it takes gradients."""
        return func in _SETTERS and id(args[0]) in self._begun

    def set(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make such a call; what is made of the weight from now on is made of it so."""
        weight, name = args[0], self._ledger.names[id(args[0])]
        with self._at.hushed:
            result = func(*args, **kwargs)
            takes = weight.requires_grad
        if not self._begun[id(weight)]:
            if not takes:
                return result
            raise CloseModule(
                self._at.path,
                f"{self._at.source()}: {name} takes gradients for a part of a forward; let it take them "
                "before the model is captured, or detach() what is made of it",
            )
        self._ledger.refs.pop(id(weight), None)
        (self._ledger.frozen.discard if takes else self._ledger.frozen.add)(id(weight))
        return result

    def inside(self, module: nn.Module) -> tuple[str, ...]:
        """The names in a module of weights that are frozen now."""
        frozen = self._ledger.frozen
        return tuple(n for n, p in module.named_parameters() if id(p) in frozen) if frozen else ()

    def check_left(self) -> None:
        """No weight may be left frozen. Raises :class:`CloseModule`."""
        left = [self._ledger.names[weight] for weight in self._begun if weight in self._ledger.frozen]
        if left:
            raise CloseModule(
                "",
                f"a forward leaves {', '.join(left[:3])} with requires_grad=False, where it was True; set it "
                "back before the forward ends, or freeze it before the model is captured",
            )
