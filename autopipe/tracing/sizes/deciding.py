"""Which calls of a form read what tensors hold, and may go another way on other data.

Asking them on other data whether they mix rows is left to ``rows``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..calls.call import Call, Depends, Recording
from ..calls.functions import classify
from ..calls.named import Named
from ..code.leaves import is_atomic
from .results import Rows

__all__ = ["FACTORS", "given_to_readers", "scaled"]

FACTORS = (64.0, -64.0, 1 / 64)
"""What floating-point values are taken times, so that code which compares them may find otherwise."""


def given_to_readers(model: nn.Module, form: Recording, run: Rows) -> set[int]:
    """Ids of the calls whose values code that stays whole is given, and reads some of.

    ``run`` runs the form, and shows each call once it has run; it does not where torch's own layers alone
    are given anything.
    """
    given = {id(call): [*filter(_may_vary, call.inputs)] for call in form.calls if _is_code(model, call)}
    found: set[int] = set()
    if not any(given.values()):
        return found
    with _Noted() as noted:

        def look(call: Call, value: Any) -> None:
            if noted.has_read:
                found.update(map(id, given.get(id(call), ())))
            noted.has_read = False

        run("ab", look)
    return found


def _is_code(model: nn.Module, call: Call) -> bool:
    """Whether a call is of the model's own code."""
    if call.op == "call_module":
        return not is_atomic(model.get_submodule(call.target))
    return isinstance(call.target, Named) and not call.is_size


def _may_vary(call: Call) -> bool:
    value = call.value
    return bool(call.depends & Depends.INPUT) and isinstance(value, Tensor) and value.is_floating_point()


def scaled(calls: Collection[int], factor: float, call: Call, value: Any) -> Any:
    """What takes the place of a call's value: ``factor`` times as much, of the calls with such ids."""
    return value * factor if id(call) in calls else None


class _Noted(TorchFunctionMode):
    """Notes that a value of a tensor is read."""

    def __init__(self) -> None:
        super().__init__()
        self.has_read = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_read = self.has_read or classify(func)[0] == "read"
        return func(*args, **(kwargs or {}))
