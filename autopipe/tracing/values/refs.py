"""What a value is to a recording: what a call gives, or a piece of that.

Which values there are is left to ``ledger``.
"""

from __future__ import annotations

from typing import Any

from ..calls.call import Call
from ..inputs.structure import Step

__all__ = ["Piece", "Ref"]


class Piece:
    """A piece of an earlier value, made a call when first used."""

    __slots__ = ("call", "parent", "step", "value")

    def __init__(self, parent: Ref, step: Step, value: Any) -> None:
        self.parent, self.step, self.value = parent, step, value
        self.call: Call | None = None


Ref = Call | Piece
