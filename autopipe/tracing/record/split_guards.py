"""Into how many pieces torch cuts a tensor where its size decides: guarded, since code takes each by itself.

Comparing the guard at other sizes is left to ``sizes``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..calls.call import Depends
from ..values.ledger import Ledger
from ..values.tracked import pin, plain

__all__ = ["hold"]

_BY_LENGTH = ("split", "unsafe_split")
_BY_NUMBER = ("chunk", "unsafe_chunk")
_SPLITTING = frozenset({*_BY_LENGTH, *_BY_NUMBER, "unbind"})


def hold(ledger: Ledger, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Guard the number of pieces that the torch function of this name is going to give."""
    if name not in _SPLITTING:
        return
    tensor, *rest = (*args, *(v for k, v in kwargs.items() if k != "dim"))
    if name == "unbind":
        rest = [1, *rest]
    length = rest[0] if rest else None
    if not isinstance(tensor, torch.Tensor) or not tensor.dim() or not isinstance(length, int):
        return
    axis = plain(kwargs.get("dim", rest[1] if len(rest) > 1 else 0)) % tensor.dim()
    n: Any = tensor.shape[axis]
    if n == 0 or plain(length) <= 0:
        return
    ref = ledger.find(tensor)
    if ledger.extent_depends(ref) & (Depends.SHAPE | Depends.DATA):
        n = ledger.numbers.size(tensor, ref, axis, n)
    if name in _BY_NUMBER:
        length = (n + length - 1) // length
    pin((n + length - 1) // length)
