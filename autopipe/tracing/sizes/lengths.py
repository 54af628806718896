"""Sizes read from intermediate values are read from the input instead, where they are the size of one.

What follows for cutting (such sizes need nothing but inputs, so every stage can compute its own) is left to
``opgraph``; finding the formulas to ``explore``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from ...graph import Dim
from ...units import Size
from ..calls.call import Call, Depends, Recording
from ..calls.named import qualified_name
from ..code.leaves import is_atomic, is_compiled
from ..members import submodule
from .unproven import Proofs

__all__ = ["read_from_inputs"]

_SHAPED_BY_DATA = {"repeat_interleave", "one_hot", "bincount", "masked_select", "nonzero", "unique"}
_MOST_LEAVES = 2
_TORCH = {"torch", "_operator", "operator", "builtins", "math"}


def read_from_inputs(
    model: nn.Module,
    recording: Recording,
    dims: Sequence[Dim],
    shapes: Mapping[int, tuple[tuple[Size, ...], ...]],
    proofs: Proofs,
) -> None:
    """Let each size call whose tensor has an input's size, whatever the data, ask that input.

    ``shapes`` holds formulas of the calls' shapes by id. Only sizes are touched that come from one input: of
    two inputs that were equally long at capture, either might be meant.
    """
    if not dims:
        return
    places = {d.name: d.where for d in dims}
    placeholders = {c.target: c for c in recording.calls if c.op == "placeholder"}
    reached: dict[int, frozenset[str]] = {}
    leaves: dict[int, frozenset[Call] | None] = {}

    for call in recording.calls:
        given = call.inputs
        own = {call.target} if call.op == "placeholder" else set()
        reached[id(call)] = frozenset(own).union(*(reached[id(c)] for c in given))
        leaves[id(call)] = _behind(model, call, [leaves[id(c)] for c in given])
        source = given[0] if given else None
        if source is None or not _is_size(call) or source.op == "placeholder":
            continue
        formula = shapes[id(source)][0][call.args[1]] if shapes.get(id(source)) else None
        found = [p for p in places.get(str(formula), ()) if p[0] in reached[id(source)]]
        behind = leaves[id(source)]
        if len(found) == 1 and behind is not None and all(map(proofs.of, behind)):
            name, axis = found[0]
            call.take((placeholders[name], axis), {})
            call.depends = Depends.SHAPE
            reached[id(call)] = frozenset({name})


def _is_size(call: Call) -> bool:
    return call.op == "call_method" and call.target == "size" and call.is_size and len(call.args) == 2


def _behind(model: nn.Module, call: Call, given: Sequence[frozenset[Call] | None]) -> frozenset[Call] | None:
    """The leaves to look into for whether shapes alone decide a call's shape; None where data may.

    None too where they are many: looking into one takes a run of it.
    """
    if call.depends & Depends.DATA or any(leaves is None for leaves in given):
        return None
    found = frozenset[Call]().union(*(leaves for leaves in given if leaves))
    if call.op == "call_module":
        module = submodule(model, call.target)
        is_plain = is_atomic(module) and not is_compiled(module) and not module._forward_hooks
        found |= frozenset() if is_plain else {call}
        return found if len(found) <= _MOST_LEAVES else None
    if call.op == "call_function":
        root, _, last = qualified_name(call.target).rpartition(".")
        return found if root.split(".")[0] in _TORCH and last not in _SHAPED_BY_DATA else None
    return None if call.target in _SHAPED_BY_DATA else found
