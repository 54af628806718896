"""Sizes of tensors that a question does not make, written as calls on the inputs that tell them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ...graph import Dim
from ..calls.call import Call
from ..calls.named import Named
from ..values.tracked import plain
from .variation import Check

__all__ = ["by_formula", "like_an_input"]


def like_an_input(tensors: Mapping[str, torch.Tensor], call: Call) -> Call:
    """A size as that of an input as long; whether of that one, only other sizes can tell."""
    places = ((n, a) for n, t in tensors.items() for a, s in enumerate(t.shape) if s == call.value)
    place = next(places, None)
    return _constant_number(call.value) if place is None else _size_of(*place)


def by_formula(
    tensors: Mapping[str, torch.Tensor],
    dims: Sequence[Dim],
    shapes: Mapping[int, Any],
    kept: Iterable[Call],
    call: Call,
) -> Call:
    """A size as its formula in the sizes of inputs says: of its tensor's call, or of one ``kept`` like it.

    ``shapes`` are the formulas of the calls' shapes by id. Without one the size is as that of an input as
    long.
    """
    held = shapes.get(id(call.inputs[0])) or _shapes_alike(shapes, kept, call.inputs[0])
    if not held:
        return like_an_input(tensors, call)
    formula = held[0][plain(call.args[1])]
    if isinstance(formula, int):
        return _constant_number(call.value)
    check = Check(operator.pos, (formula,), None, call.source)
    place = {d.name: d.where[0] for d in dims}
    function = Named(lambda *sizes: check.values(dict(zip(check.symbols, sizes, strict=True)))[0], "size")
    return Call("call_function", function, tuple(_size_of(*place[s]) for s in check.symbols))


def _shapes_alike(shapes: Mapping[int, Any], kept: Iterable[Call], made: Call) -> Any:
    """Of the same call in a form that was kept, where another recording made this tensor."""
    where = (made.op, made.target, made.path, made.source)
    alike = (c for c in kept if shapes.get(id(c)) and (c.op, c.target, c.path, c.source) == where)
    return next((shapes[id(c)] for c in alike if c.value.shape == made.value.shape), None)


def _size_of(name: str, axis: int) -> Call:
    return Call("call_method", "size", (Call("placeholder", name), axis))


def _constant_number(value: Any) -> Call:
    return Call("call_function", operator.pos, (value,))
