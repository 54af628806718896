"""Whether a call gives rows what it gives them among a few where it is given many, asked of it alone.

So a limit on rows in the code of one layer takes no run of the whole form on so many. What follows where this
does not tell is left to ``row_questions``.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from ...graph import Dim
from ...units import Size
from ..calls.call import Call, Depends, Recording, map_calls
from ..calls.likeness import is_equal
from ..calls.perform import run_call
from ..inputs.structure import Spec, flatten, unflatten
from ..sizes.dims import axis_of
from .results import ROUNDED, Rows, axes, is_close, run_until

__all__ = ["leaves_anything", "untold_alone"]

_logger = logging.getLogger("autopipe")
_Shapes = Mapping[int, tuple[tuple[Size, ...], ...]]
_OF_ROWS = Depends.INPUT | Depends.SHAPE


def untold_alone(
    model: nn.Module,
    form: Recording,
    few: Rows,
    more: Rows,
    limits: Mapping[Call, Set[int]],
    dim: Dim,
    shapes: _Shapes,
    device: torch.device,
) -> set[int]:
    """The numbers of rows, ``limits`` in the code of calls, above which one may give rows something else.

    ``few`` runs a form that draws nothing on rows a and b, ``more`` on several of each: what has no rows is
    to be the same in both. Calls that keep or write anything, or have rows otherwise than along one axis, do
    not tell.
    """
    told = {call: numbers for call, numbers in limits.items() if not leaves_anything(form, call)}
    found = set[int]().union(*(numbers for call, numbers in limits.items() if call not in told))
    taken = {c for call in told for c in call.inputs}
    before: dict[Call, _Value] = {}
    values: dict[Call, _Value] = {}

    def keep(call: Call, value: Any) -> None:
        if call in taken and call.depends & _OF_ROWS:
            before[call] = _Value.of(call, value, dim, shapes).copied()

    def look(call: Call, value: Any) -> None:
        if call in taken:
            values[call] = _Value.of(call, value, dim, shapes)
        for n in told.get(call, set()) - found:
            if not is_alike(call, value, n // 2 + 1):
                found.add(n)

    def is_alike(call: Call, value: Any, times: int) -> bool:
        here = _Value.of(call, value, dim, shapes)
        if not here.is_told or not all(values[c].stays(before.get(c)) for c in call.inputs):
            return False
        args, kwargs = (map_calls(g, lambda c: values[c].often(times)) for g in (call.args, call.kwargs))
        try:
            there = run_call(model, form.constants, call, args, kwargs, {}, device)
        except Exception as error:
            # any Python of the model, on rows it may not take
            _logger.debug("more rows could not be given to one call: %s", error)
            return False
        return here.is_among(flatten(there)[0])

    for last in [call for call in form.calls if call in told][-1:]:
        run_until(few, "ab", last, keep)
        run_until(more, "ab", last, look)
    return found


def leaves_anything(form: Recording, call: Call) -> bool:
    """Whether a call may leave something for others, or go by what it has left."""
    return bool(call.keeps or call.mutated or call.writes or call.has_effect or call.path in form.begun)


@dataclasses.dataclass(frozen=True, slots=True)
class _Value:
    """The ``leaves`` of what a call gives for rows a b a b …, each with the axis of its rows, if it has any.

    Which it has ``is_told``.
    """

    leaves: list[Any]
    places: list[int | None]
    spec: Spec
    is_told: bool

    @classmethod
    def of(cls, call: Call, value: Any, dim: Dim, shapes: _Shapes) -> _Value:
        leaves, spec = flatten(value)
        formulas = shapes.get(id(call), ())
        places: list[int | None] = [None] * len(leaves)
        held = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        is_told = len(held) == len(formulas)
        for number, i in enumerate(held if is_told else ()):
            places[i] = axis_of(formulas[number], dim.name)
            is_told &= places[i] is None or axes(call, number, dim, shapes) == [places[i]]
        return cls(leaves, places, spec, is_told)

    def copied(self) -> _Value:
        """The same as it is now."""
        leaves = [v.clone() if isinstance(v, Tensor) else v for v in self.leaves]
        return dataclasses.replace(self, leaves=leaves)

    def stays(self, before: _Value | None) -> bool:
        """Whether what has no rows is what it was ``before``; nothing is, where no rows have a say in it."""
        pairs = zip(self.leaves, self.places, before.leaves, strict=True) if before else ()
        return self.is_told and all(axis is not None or is_equal(now, then) for now, axis, then in pairs)

    def often(self, times: int) -> Any:
        """The value with row a so many times, and row b behind."""

        def of(leaf: Any, axis: int | None) -> Any:
            if axis is None:
                return leaf
            return leaf.index_select(axis, torch.tensor([0] * times + [1] * times, device=leaf.device))

        return unflatten(self.spec, map(of, self.leaves, self.places))

    def is_among(self, there: list[Any]) -> bool:
        """Whether row a is the first ``there`` and row b the last, and what has no rows the same."""
        return len(there) == len(self.leaves) and all(
            map(_is_first_and_last, self.leaves, there, self.places)
        )


def _is_first_and_last(here: Any, there: Any, axis: int | None) -> bool:
    if not isinstance(there, Tensor) or axis is None:
        return is_equal(here, there)
    if here.ndim != there.ndim:
        return False
    pairs = [(here.select(axis, 0), there.select(axis, 0)), (here.select(axis, 1), there.select(axis, -1))]
    return all(a.shape == b.shape and is_close(a, b, ROUNDED) for a, b in pairs)
