"""Parameters that a model's own code writes to: holds within bounds, or moves after others.

Bounds are ``self.scale.clamp_(0, 4.6)`` or ``p.data.abs_()``: a later microbatch writes what is there
already, so what earlier ones keep for their backwards stays right. Moves are averages of other weights in
parameters that take no gradients, ``k.data = 0.99 * k.data + 0.01 * q.data``, and are otherwise each time:
``rows`` has them run once a step. Both are recorded as written to behind autograd's back. Any other write to
a parameter keeps its module whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from ..calls.call import Call
from ..calls.functions import plain_name, storages, tensors, writes_in_place
from ..calls.module_modes import in_modes
from ..code.restart import CloseModule, PutBack
from ..members import submodule
from ..values.ledger import Ledger

__all__ = ["Bounded"]

_SETS_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SAME_AGAIN = {
    "abs", "absolute", "clamp", "clamp_max", "clamp_min", "clip", "fill", "nan_to_num", "relu", "zero",
}  # fmt: skip
"""Functions of a tensor and numbers that give for what they gave the same."""
_MOVES = {
    "add", "addcdiv", "addcmul", "copy", "div", "divide", "index_add", "index_copy", "lerp",
    "masked_fill", "mul", "multiply", "scatter", "scatter_add", "setitem", "sub", "subtract", "true_divide",
    "iadd", "imul", "isub", "itruediv",
} | _SAME_AGAIN  # fmt: skip
"""Functions that write other numbers to where a tensor lies, and leave it as large as it is."""
_ALIASES = {"data", "detach"}


class Bounded:
    """Which parameters were written to so far, by the memory they lie in.

    Attributes
    ----------
    put_back: ids of the tensors whose content a run's end puts back.
    moved: the parameters, by name, that are otherwise after each call.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._behind: torch.Tensor | None = None
        self._written: set[int] = set()
        self.put_back: Collection[int] = ()
        self.moved: set[str] = set()

    def begin(self, model: nn.Module) -> None:
        """The model is about to be called."""
        self._model = model

    @functools.cached_property
    def _parameters(self) -> dict[int, dict[str, nn.Parameter]]:
        """Those that lie in a memory, by name."""
        held: dict[int, dict[str, nn.Parameter]] = {}
        for name, parameter in self._model.named_parameters():
            for place in () if nn.parameter.is_lazy(parameter) else storages(parameter):
                held.setdefault(place, {})[name] = parameter
        return held

    def writes(self, name: str, actual: Any) -> bool:
        """Whether a function writes to a parameter."""
        return bool(self._touched(name, actual)) and actual[0][0] is not self._behind

    def _touched(self, name: str, actual: Any) -> set[int]:
        given = tensors(actual[1].get("out"))
        given += tensors(actual)[:1] if writes_in_place(name, actual) else []
        if not given:
            return set()
        with self._ledger.at.hushed:
            return self._parameters.keys() & frozenset().union(*map(storages, given))

    def write(self, func: Callable[..., Any], name: str, actual: Any, record: Callable[..., Any]) -> Any:
        """Record a write to a parameter by ``record``; or raise :class:`CloseModule`, or :class:`PutBack`."""
        (tensor, *rest), kwargs = actual
        touched = self._touched(name, actual)
        held = {n: p for place in touched for n, p in self._parameters[place].items()}
        shown = next(iter(held))
        is_copied = (func == _SETS_DATA or name == "copy_") and len(rest) == 1
        value = self._ledger.refs.get(id(rest[0]), (None, None))[1] if is_copied else None
        at = self._ledger.at
        is_same = self._is_same_again(value) if is_copied else name.removesuffix("_") in _SAME_AGAIN
        has_tensors = bool(not is_copied and tensors((rest, kwargs)))
        is_bounded = is_same and not has_tensors
        if not is_bounded and not self._may_move(held.values(), func, name, actual):
            raise CloseModule(
                at.path,
                f"{at.source()}: {name} writes to parameter {shown}, as each microbatch would "
                "again; do that between steps",
            )
        for call in self._ledger.calls if is_bounded else ():
            if call is not value and self._reads(call) & touched:
                raise CloseModule(
                    at.path,
                    f"{at.source()}: {name} writes to parameter {shown}, which "
                    f"{call.source} has read before; do that first in the forward, or between steps",
                )
        large = [n for n, p in held.items() if not (p.is_meta or id(p) in self.put_back)]
        if large:
            raise PutBack(large)
        if not is_bounded:
            self.moved |= held.keys()
            rest, kwargs = (
                self._as_values(rest, record),
                dict(zip(kwargs, self._as_values(kwargs.values(), record), strict=True)),
            )
        self._written |= touched
        self._behind = data = record(torch.Tensor.data.__get__, (tensor,), {})  # type: ignore[attr-defined]
        if is_copied:
            record(torch.Tensor.copy_, (data, rest[0]), {})
        else:
            record(func, (data, *rest), kwargs)
        self._behind = None
        return None if func == _SETS_DATA else tensor

    def _as_values(self, given: Iterable[Any], record: Callable[..., Any]) -> list[Any]:
        """What a write is given, with parameters as values: these may come from another stage."""
        names = self._ledger.names
        return [record(torch.Tensor.detach, (v,), {}) if id(v) in names else v for v in given]

    def _may_move(
        self, held: Iterable[nn.Parameter], func: Callable[..., Any], name: str, actual: Any
    ) -> bool:
        """Whether a write to parameters is to ones that take no gradients, and lets none through."""
        (tensor, *rest), kwargs = actual
        with self._ledger.at.hushed:
            if not isinstance(tensor, torch.Tensor) or any(p.requires_grad for p in (tensor, *held)):
                return False
            if func == _SETS_DATA:
                return _is_like(tensor, rest[0])
            takes = torch.is_grad_enabled() and any(t.requires_grad for t in tensors((rest, kwargs)))
            return name.strip("_") in _MOVES and "out" not in kwargs and not takes

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
            weights: Iterable[nn.Parameter] = submodule(self._model, call.path).parameters()
            with self._ledger.at.hushed:
                return call.reads.union(*map(storages, weights))
        return call.reads - call.writes

    def end(self) -> None:
        """Layers that have a parameter read it where it was written to."""
        for call in self._ledger.calls if self._written else ():
            call.reads |= self._reads(call) & self._written if _is_layer(call) else frozenset()


def _is_like(old: torch.Tensor, new: Any) -> bool:
    """Whether a tensor may be copied to where another lies, as if it were put there."""
    if not isinstance(new, torch.Tensor) or new.requires_grad:
        return False
    return (old.shape, old.dtype, old.device, old.layout) == (new.shape, new.dtype, new.device, new.layout)


def _is_layer(call: Call) -> bool:
    return call.op == "call_module" or call.target is in_modes
