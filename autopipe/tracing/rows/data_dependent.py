"""Which code of a form depends on the data in tensors, and other data on which it may go another way.

Asking there whether rows are mixed is left to ``mixing``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...graph import Dim
from ..calls.call import Call, Depends, Recording
from ..calls.functions import classify, plain_name
from ..calls.named import Named
from ..code.leaves import is_atomic
from .results import Rows

__all__ = ["Change", "Reading", "alike", "reading", "scales"]

Change = Callable[[str, Call, Any], Any]
"""(rows, call, value) → what takes the value's place for rows such as ``"abb"``, or None."""

_FACTORS = (64.0, -64.0, 1 / 64)
"""What floating-point values are taken times, so that code which compares them may find otherwise."""
_RANKING = frozenset({"argsort", "bincount", "cumsum", "sort", "topk"})
"""Functions by which code finds how many there are of a kind, and which come first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What a form goes by: ``given`` are ids of calls whose values code that stays whole takes, reading some.

    ``ranks`` says whether anything counts or orders what tensors hold.
    """

    given: frozenset[int] = frozenset()
    ranks: bool = False


def reading(model: nn.Module, form: Recording, run: Rows) -> Reading:
    """What a form goes by. ``run`` runs it, and shows each call once it has run.

    It does not where torch's own layers alone are given anything.
    """
    given = {id(call): [*filter(_may_vary, call.inputs)] for call in form.calls if _is_code(model, call)}
    found: set[int] = set()
    ranks = any(c.op != "call_module" and plain_name(c) in _RANKING for c in form.calls)
    if any(given.values()):
        with _Noted() as noted:

            def look(call: Call, value: Any) -> None:
                if noted.has_read:
                    found.update(map(id, given.get(id(call), ())))
                noted.has_read = False

            run("ab", look)
        ranks = ranks or noted.ranks
    return Reading(frozenset(found), ranks)


def scales(found: Reading, axes: Mapping[int, int]) -> list[Change]:
    """What makes more or less of the values that code kept whole reads, and more of one row alone.

    ``axes`` are those along which the rows of calls' values lie, by id of the call.
    """
    if not found.given:
        return []
    return [*(functools.partial(_scaled, found.given, f) for f in _FACTORS), functools.partial(_uneven, axes)]


def alike(given: Mapping[str, Tensor], dim: Dim) -> dict[str, Tensor]:
    """The tensors with all of a row as is its first place, so that code finds many of one kind.

    A limit on these, as of tokens for an expert, is met. Floating point stays as it is along its last axis.
    """
    out = dict(given)
    for name, axis in dim.where:
        tensor = given[name].detach()
        ends = tensor.ndim - (tensor.is_floating_point() or tensor.is_complex())
        for other in (a for a in range(ends) if a != axis and tensor.numel()):
            tensor = tensor.narrow(other, 0, 1).expand_as(given[name])
        out[name] = tensor.contiguous().requires_grad_(given[name].requires_grad)
    return out


def _is_code(model: nn.Module, call: Call) -> bool:
    """Whether a call is of the model's own code."""
    if call.op == "call_module":
        return not is_atomic(model.get_submodule(call.target))
    return isinstance(call.target, Named) and not call.is_size


def _may_vary(call: Call) -> bool:
    value = call.value
    return bool(call.depends & Depends.INPUT) and isinstance(value, Tensor) and value.is_floating_point()


def _scaled(calls: Collection[int], factor: float, rows: str, call: Call, value: Any) -> Any:
    """``factor`` times the value of a call, of those with such ids."""
    return value * factor if id(call) in calls else None


def _uneven(axes: Mapping[int, int], rows: str, call: Call, value: Any) -> Any:
    """The value of a call with more of row a, of those whose rows lie along ``axes``."""
    axis = axes.get(id(call))
    if axis is None or value.shape[axis] != len(rows):
        return None
    factors = value.new_tensor([max(_FACTORS) if row == "a" else 1.0 for row in rows])
    return value * factors.view(-1, *[1] * (value.ndim - axis - 1))


class _Noted(TorchFunctionMode):
    """Notes that values of a tensor are read, and that what they are is counted or ordered."""

    def __init__(self) -> None:
        super().__init__()
        self.has_read = self.ranks = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, name = classify(func)
        self.has_read = self.has_read or kind == "read"
        self.ranks = self.ranks or kind == "data shaped" or name in _RANKING
        return func(*args, **(kwargs or {}))
