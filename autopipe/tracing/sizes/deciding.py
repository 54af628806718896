"""Which calls of a form read what tensors hold, and may go another way on other data.

Asking them on other data whether they mix rows is left to ``rows``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..calls.call import Call, Depends, Recording
from ..calls.functions import classify
from .results import Rows

__all__ = ["FACTORS", "given_to_readers", "scaled"]

FACTORS = (8.0, -8.0, 0.125)
"""What floating-point values are taken times, so that code which compares them may find otherwise."""


def given_to_readers(form: Recording, run: Rows) -> set[int]:
    """Ids of the calls whose values code that stays whole is given, and reads some of.

    ``run`` runs the form, and shows each call once it has run.
    """
    found: set[int] = set()
    with _Noted() as noted:

        def look(call: Call, value: Any) -> None:
            if noted.has_read and call.op.startswith("call_") and not call.is_size:
                found.update(id(c) for c in call.inputs if c.depends & Depends.INPUT)
            noted.has_read = False

        run("ab", look)
    return found


def scaled(calls: Collection[int], factor: float, call: Call, value: Any) -> Any:
    """What takes the place of a call's value: ``factor`` times as much, of the calls with such ids."""
    is_one = id(call) in calls and isinstance(value, Tensor) and value.is_floating_point()
    return value * factor if is_one else None


class _Noted(TorchFunctionMode):
    """Notes that a value of a tensor is read."""

    def __init__(self) -> None:
        super().__init__()
        self.has_read = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_read = self.has_read or classify(func)[0] == "read"
        return func(*args, **(kwargs or {}))
