"""Sizes read from intermediate values are read from the input instead, where they are the size of one.

What follows for cutting (such sizes need nothing but inputs, so every stage can compute its own) is left to
``opgraph``; finding the formulas to ``vary``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from ..graph import Dim
from ..units import Size
from .calls import Call, Depends, Recording
from .functions import qualified_name
from .leaves import is_atomic, is_compiled

__all__ = ["read_from_inputs"]

_SHAPED_BY_DATA = {"repeat_interleave", "one_hot", "bincount", "masked_select", "nonzero", "unique"}
_TORCH = {"torch", "_operator", "operator", "builtins", "math"}


def read_from_inputs(
    model: nn.Module,
    recording: Recording,
    dims: Sequence[Dim],
    shapes: Mapping[int, tuple[tuple[Size, ...], ...]],
) -> None:
    """Let each size call whose tensor has an input's size, whatever the data, ask that input.

    ``shapes`` holds formulas of the calls' shapes by id. Only sizes are touched that come from one input: of
    two inputs that were equally long at capture, either might be meant.
    """
    places = {d.name: d.where for d in dims}
    placeholders = {c.target: c for c in recording.calls if c.op == "placeholder"}
    reached: dict[int, frozenset[str]] = {}
    sized: set[int] = set()
    for call in recording.calls:
        given = call.inputs
        own = {call.target} if call.op == "placeholder" else set()
        reached[id(call)] = frozenset(own).union(*(reached[id(c)] for c in given))
        if all(id(c) in sized for c in given) and _is_sized_by_shapes(model, call):
            sized.add(id(call))
        source = given[0] if given else None
        if source is None or not _is_size(call) or source.op == "placeholder" or id(source) not in sized:
            continue
        formula = shapes[id(source)][0][call.args[1]] if shapes.get(id(source)) else None
        found = [p for p in places.get(str(formula), ()) if p[0] in reached[id(source)]]
        if len(found) == 1:
            name, axis = found[0]
            call.take((placeholders[name], axis), {})
            call.depends = Depends.SHAPE
            reached[id(call)] = frozenset({name})


def _is_size(call: Call) -> bool:
    return call.op == "call_method" and call.target == "size" and call.is_size and len(call.args) == 2


def _is_sized_by_shapes(model: nn.Module, call: Call) -> bool:
    """Whether the shape of a call's result is a matter of its arguments' shapes alone."""
    if call.op in ("placeholder", "get_attr"):
        return True
    if call.op == "call_module":
        module = model.get_submodule(call.target)
        is_plain = is_atomic(module) and not is_compiled(module) and not module._forward_hooks
        return is_plain and not call.depends & Depends.DATA
    name = call.target if isinstance(call.target, str) else qualified_name(call.target)
    root, _, last = name.rpartition(".")
    is_known = call.op == "call_method" or root.split(".")[0] in _TORCH
    return is_known and last not in _SHAPED_BY_DATA and not call.depends & Depends.DATA
