"""Performs recorded calls one by one, outside of any graph.

Whole recordings are run again by ``rerun``; generated code runs by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..members import registered, submodule
from . import regions
from .bounds import within_bounds
from .call import Call, Depends, map_calls
from .functions import on_one_device

__all__ = ["Run", "ask", "is_size_of_made", "run_call", "way_to"]

Run = Callable[[Call, Any, Any], Any]
"""(call, args, kwargs) → what it gives."""


def is_size_of_made(call: Call) -> bool:
    """Whether a call asks for a size of a tensor that is no input, and which data have no say in."""
    is_size = call.op == "call_method" and call.target == "size" and call.is_size and len(call.args) == 2
    return is_size and not call.depends & Depends.DATA and call.inputs[0].op != "placeholder"


def ask(calls: Sequence[Call], run: Run) -> Any:
    """What the last of some calls gives; ``run(call, args, kwargs)`` performs them."""
    values: dict[int, Any] = {}

    def value(call: Call) -> Any:
        if id(call) not in values:  # a size may have come to be read elsewhere since
            values[id(call)] = run(call, map_calls(call.args, value), map_calls(call.kwargs, value))
        return values[id(call)]

    for call in calls:
        value(call)
    return value(calls[-1])


def run_call(
    model: nn.Module,
    constants: Mapping[str, Any],
    call: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: Mapping[str, torch.Tensor],
    device: torch.device,
    way: Sequence[str] | None = None,
) -> Any:
    """What one call gives for these arguments, on the model's own modules.

    An input ``given`` with an axis more than at capture has packed rows apart, and is packed again. Where
    calls run many times, a module's ``way`` is found once: see :func:`way_to`.
    """
    if call.op == "placeholder":
        value, then = given[call.target], call.value
        return value.flatten(0, 1) if isinstance(then, torch.Tensor) and value.ndim > then.ndim else value
    if call.op == "get_attr":
        return lookup(model, call.target, constants, device)
    if device.type == "meta":
        args, kwargs = on_one_device((args, kwargs))
    if call.region is None and not call.derives:
        return _run(model, call, args, kwargs, way)
    # whoever runs what derives alone may have gradients off
    enabled = torch.enable_grad() if call.derives else contextlib.nullcontext()
    with enabled, contextlib.nullcontext() if call.region is None else regions.context(call.region):
        return _run(model, call, args, kwargs, way)


def _run(
    model: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], way: Sequence[str] | None
) -> Any:
    if call.op == "call_module":
        return (submodule(model, call.target) if way is None else _along(model, way))(*args, **kwargs)
    if call.op == "call_method":
        return getattr(args[0], call.target)(*args[1:], **kwargs)
    return within_bounds(call.target)(*args, **kwargs)


def way_to(model: nn.Module, path: str) -> tuple[str, ...] | None:
    """The names by which a submodule is found among those of the modules ahead of it.

    None where these do not hold it themselves: see :func:`submodule`.
    """
    found, names = model, tuple(path.split("."))
    for name in names:
        if name not in getattr(found, "_modules", ()):
            return None
        found = found._modules[name]  # type: ignore[assignment]
    return names


def _along(model: nn.Module, way: Sequence[str]) -> Any:
    found: Any = model
    for name in way:
        found = found._modules[name]
    return found


def lookup(model: nn.Module, target: str, constants: Mapping[str, Any], device: torch.device) -> Any:
    """What a ``get_attr`` target stands for."""
    if target == "_device":
        return device
    if target in constants:
        return constants[target]
    return registered(model, target)
