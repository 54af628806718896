"""Whether data have a say in a tensor's very shape, found by making it again from tensors without data.

What is done about it is left to ``ledger``.
"""

from __future__ import annotations

from typing import Any

import torch

from ..calls.call import UNSAFE, Call, Depends, map_calls, meta
from ..calls.functions import tensors
from ..calls.named import Named
from ..inputs.structure import flatten, unflatten

__all__ = ["Extents"]

_NO_DATA = torch.device("meta")


class Extents:
    """Which calls of a recording give tensors whose sizes data decide, each asked once."""

    def __init__(self) -> None:
        self.known: dict[int, bool] = {}

    def is_by_data(self, call: Call) -> bool:
        """Whether sizes of what a call gives follow from data of inputs, weights or draws."""
        waiting = [call]
        while waiting:
            last = waiting[-1]
            open_ones = [c for c in last.inputs if id(c) not in self.known]
            if open_ones and id(last) not in self.known:
                waiting += open_ones
                continue
            waiting.pop()
            if id(last) not in self.known:
                is_made_so = any(self.known[id(c)] for c in last.inputs)
                self.known[id(last)] = is_made_so or bool(last.depends & Depends.DATA) or _needs_data(last)
        return self.known[id(call)]


def _needs_data(call: Call) -> bool:
    """Whether a call that takes whole numbers cannot be made, or not of the same shape, without data.

    A plain number that is an input is another one then.
    """
    is_torchs = call.op in ("call_function", "call_method") and not isinstance(call.target, Named)
    if not is_torchs or call.accessor or call.is_random or not call.depends & UNSAFE:
        return False
    takes_number = any(map(_is_input, call.inputs))
    if not takes_number and not any(not t.is_floating_point() for c in call.inputs for t in tensors(c.value)):
        return False
    args, kwargs = _without_data(call.args), _without_data(call.kwargs)
    try:
        with torch.no_grad():
            if call.op == "call_method":
                made = getattr(args[0], call.target)(*args[1:], **kwargs)
            else:
                made = call.target(*args, **kwargs)
    except Exception as error:  # whatever it is: then it takes data, unless it only moves them
        return "Cannot copy out of meta tensor" not in str(error)
    return [t.shape for t in tensors(made)] != [t.shape for t in tensors(call.value)]


def _is_input(call: Call) -> bool:
    """Whether a call gives a number that is made of one among the inputs."""
    return call.is_size and bool(call.depends & Depends.NUMBER)


def _without_data(value: Any) -> Any:
    """An argument with tensors without data in the place of calls, and no device for them."""

    def made(call: Call) -> Any:
        if _is_input(call):
            return call.value + 1
        if isinstance(call.value, torch.device):
            return _NO_DATA
        leaves, spec = flatten(call.value)
        return unflatten(spec, [meta(v) for v in leaves])

    value = map_calls(value, made)
    if isinstance(value, dict) and isinstance(value.get("device"), (str, torch.device)):
        value = {**value, "device": _NO_DATA}
    return value
