"""On the meta device, asks torch once what each op gives for each form of its arguments.

A model of alike layers makes the same few calls hundreds of times a run, and most of torch's kernels there
are Python. What runs are made is left to ``session`` and ``sizes``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn

from ...torch_private import TorchDispatchMode, is_operator

__all__ = ["asked_once"]

_PLAIN = (
    int,
    float,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
"""What arguments are told by beside tensors, with its type: 1, 1.0 and True are equal."""

_BY_DATA = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
}
"""Ops that draw, or give what their arguments hold and not their form alone."""


def asked_once(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Within it kernels of the meta device are asked once for each form of call; of others nothing changes.

    Only torch's own ops that neither write nor give a view. What an op refuses is asked each time.
    """
    return _Asked() if device.type == "meta" else contextlib.nullcontext()


class _Unlike(Exception):
    """An argument whose form does not tell what comes of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Form:
    """What is known of a result: its place in memory is its own."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def made(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


class _Asked(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[Any, _Form] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _goes_by_form(func):
            return func(*args, **kwargs)
        try:
            key = func, torch.get_default_dtype(), _form_of(args), _form_of(tuple(kwargs.items()))
        except _Unlike:
            return func(*args, **kwargs)
        if (known := self.known.get(key)) is not None:
            return known.made()
        result = func(*args, **kwargs)
        if type(result) is Tensor and result.device.type == "meta" and result.storage_offset() == 0:
            form = _Form(tuple(result.shape), result.stride(), result.dtype)
            if form.made().untyped_storage().nbytes() == result.untyped_storage().nbytes():
                self.known[key] = form
        return result


@functools.cache
def _goes_by_form(func: Any) -> bool:
    """Whether an op is one of torch's that gives one tensor of its own, of a form that those given tell."""
    if not is_operator(func) or func.namespace != "aten" or _BY_DATA & {*func.tags}:
        return False
    schema = func._schema
    each = (*schema.arguments, *schema.returns)
    is_one = [str(r.type) for r in schema.returns] == ["Tensor"]
    return is_one and not any(a.alias_info for a in each)


def _form_of(value: Any) -> Any:
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        is_usual = value.device.type == "meta" and value.layout is torch.strided
        if not is_usual or value.is_conj() or value.is_neg():
            raise _Unlike
        return value.shape, value.stride(), value.dtype
    if kind in _PLAIN:
        return kind, value
    if kind is tuple or kind is list:
        return kind, *map(_form_of, value)
    raise _Unlike
