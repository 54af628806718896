"""Parameters that a model's own code holds within bounds: ``self.scale.clamp_(0, 4.6)``, ``p.data.abs_()``.

They are recorded as written to behind autograd's back: a later microbatch writes what is there already, so
what earlier ones keep for their backwards stays right. Any other write to a parameter keeps its module whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..calls.call import Call
from ..calls.functions import plain_name, storages, tensors, writes_in_place
from ..calls.module_modes import in_modes
from ..code.restart import CloseModule
from ..state.state import SMALL
from ..values.ledger import Ledger

__all__ = ["Bounded"]

_SETS_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SAME_AGAIN = {
    "abs", "absolute", "clamp", "clamp_max", "clamp_min", "clip", "fill", "nan_to_num", "relu", "zero",
}  # fmt: skip
"""Functions of a tensor and numbers that give for what they gave the same."""
_ALIASES = {"data", "detach"}


class Bounded:
    """Which parameters were written to so far, by the memory they lie in."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._behind: torch.Tensor | None = None
        self._written: set[int] = set()

    def begin(self, model: nn.Module) -> None:
        """The model is about to be called."""
        self._model = model

    @functools.cached_property
    def _parameters(self) -> dict[int, tuple[str, bool]]:
        """By the memory they lie in: their names, and whether a run's end puts back what they held."""
        held = (
            (s, (n, p.numel() <= SMALL))
            for n, p in self._model.named_parameters()
            for s in (() if nn.parameter.is_lazy(p) else storages(p))
        )
        return dict(held)

    def writes(self, name: str, actual: Any) -> bool:
        """Whether a function writes to a parameter."""
        return bool(self._touched(name, actual)) and actual[0][0] is not self._behind

    def _touched(self, name: str, actual: Any) -> set[int]:
        given = [*tensors(actual[1].get("out"))]
        given += [*tensors(actual)][:1] if writes_in_place(name, actual) else []
        if not given:
            return set()
        with self._ledger.at.hushed:
            return self._parameters.keys() & frozenset().union(*map(storages, given))

    def write(self, func: Callable[..., Any], name: str, actual: Any, record: Callable[..., Any]) -> Any:
        """Record a write to a parameter by ``record``, or raise :class:`CloseModule`."""
        (tensor, *rest), kwargs = actual
        touched = self._touched(name, actual)
        shown, is_put_back = self._parameters[min(touched)]
        is_copied = (func == _SETS_DATA or name == "copy_") and len(rest) == 1
        value = self._ledger.refs.get(id(rest[0]), (None, None))[1] if is_copied else None
        at = self._ledger.at
        is_same = self._is_same_again(value) if is_copied else name.removesuffix("_") in _SAME_AGAIN
        has_tensors = not is_copied and next(tensors((rest, kwargs)), None) is not None
        if not is_same or has_tensors or not is_put_back:
            raise CloseModule(
                at.path,
                f"{at.source()}: {name} writes to parameter {shown}, as each microbatch would "
                "again; do that between steps",
            )
        for call in self._ledger.calls:
            if call is not value and self._reads(call) & touched:
                raise CloseModule(
                    at.path,
                    f"{at.source()}: {name} writes to parameter {shown}, which "
                    f"{call.source} has read before; do that first in the forward, or between steps",
                )
        self._written |= touched
        self._behind = data = record(torch.Tensor.data.__get__, (tensor,), {})  # type: ignore[attr-defined]
        if is_copied:
            record(torch.Tensor.copy_, (data, rest[0]), {})
        else:
            record(func, (data, *rest), kwargs)
        self._behind = None
        return None if func == _SETS_DATA else tensor

    def _is_same_again(self, value: Any) -> bool:
        """Whether a call gives of a parameter what it would give of its own result."""
        if not isinstance(value, Call) or plain_name(value) not in _SAME_AGAIN:
            return False
        given = value.inputs
        while len(given) == 1 and given[0].hint in _ALIASES:
            given = given[0].inputs
        takes_gradient = any(t.requires_grad for t in tensors(value.value))
        return len(given) == 1 and given[0].op == "get_attr" and not takes_gradient

    def _reads(self, call: Call) -> frozenset[int]:
        """The memory of parameters that a call makes something of."""
        if call.op == "get_attr" or call.hint in _ALIASES:
            return frozenset()
        if _is_layer(call):
            weights: Iterable[nn.Parameter] = self._model.get_submodule(call.path).parameters()
            with self._ledger.at.hushed:
                return call.reads.union(*map(storages, weights))
        return call.reads - call.writes

    def end(self) -> None:
        """Layers that have a parameter read it where it was written to."""
        for call in self._ledger.calls if self._written else ():
            call.reads |= self._reads(call) & self._written if _is_layer(call) else frozenset()


def _is_layer(call: Call) -> bool:
    return call.op == "call_module" or call.target is in_modes
