"""Numbers at which a recording, or code kept whole, cuts rows or counts them: it may do otherwise beyond.

What the model's own code in calls does of other numbers of rows is left to ``among_many``, running a form on
more rows to ``mixing``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..calls.call import Call, Depends, Recording
from ..calls.functions import plain_name
from ..inputs.contents import is_whole

__all__ = ["CUTS", "MOST", "beside_counts", "beside_places", "places_beyond", "rows_to_try"]

MOST = 256
"""A form is run on no more rows than this."""
CUTS = frozenset({
    "__getitem__", "__setitem__", "chunk", "split", "tensor_split", "unsafe_chunk", "unsafe_split"
})  # fmt: skip
"""Functions that cut a tensor."""
_STAYING = frozenset(
    {"cumsum", "double", "expand", "float", "getitem", "mul", "sum", "to", "type_as", "view"}
)
"""Functions that give whole numbers of such."""


def beside_places(form: Recording, least: int, most: int = MOST) -> set[int]:
    """Such numbers, up to the ``most``, that calls are given which make tensors of sizes alone.

    These may be the places of rows.
    """
    of_sizes = (c for c in form.calls if c.depends & Depends.SHAPE and not c.depends & Depends.INPUT)
    makers = [c for c in of_sizes if isinstance(c.value, Tensor)]
    return {n for c in makers for n in (*c.args, *c.kwargs.values()) if type(n) is int and least < n <= most}


def beside_counts(
    form: Recording, has_rows: Callable[[Call], bool], least: int, most: int = MOST
) -> set[int]:
    """Twice the whole parts of numbers that calls are given beside counts of rows, if up to the ``most``.

    A count is a whole number without rows, made of what has these; half of the rows may be counted in it.
    """
    whole, counts = set[Call](), set[Call]()
    found = set[float]()
    for call in (
        c for c in form.calls if c.depends & Depends.INPUT and c.op not in ("placeholder", "output")
    ):
        of = [c for c in call.inputs if c.depends & Depends.INPUT]
        stays = plain_name(call) in _STAYING and bool(of) and whole.issuperset(of)
        if stays or is_whole(call.value):
            whole.add(call)
        is_beside = not counts.isdisjoint(of)
        if is_beside:
            given = (*call.args, *call.kwargs.values())
            found |= {n for n in given if isinstance(n, (int, float)) and not isinstance(n, bool)}
        if (
            not call.is_size
            and not has_rows(call)
            and (is_beside or (call in whole and any(map(has_rows, of))))
        ):
            counts.add(call)
    return {n for n in (2 * int(n) for n in found if math.isfinite(n)) if least < n <= most}


def places_beyond(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Each end of a slice, or length of a piece, beyond the axis that one of :data:`CUTS` cuts, and its size.

    So ``h[:20]`` of eight rows gives (20, 8).
    """
    if not (args and isinstance(args[0], Tensor)):
        return
    shape = args[0].shape
    if name in ("__getitem__", "__setitem__"):
        for size, cut in _cuts(shape, args[1]):
            ends = (end for end in (cut.start, cut.stop) if isinstance(end, int))
            yield from ((abs(end), size) for end in ends if abs(end) > size)
    elif shape:
        given = [*args[1:], *kwargs.values()]
        axis = kwargs.get("dim", args[2] if len(args) > 2 else 0)
        if given and isinstance(given[0], int) and isinstance(axis, int) and given[0] > shape[axis]:
            yield given[0], shape[axis]


def _cuts(shape: Sequence[int], index: Any) -> Iterator[tuple[int, slice]]:
    """The slices of an index, each with the size of its axis; those behind an ellipsis from the end on."""
    items = [*index] if isinstance(index, tuple) else [index]
    rest = next((i for i, item in enumerate(items) if item is ...), None)
    ahead, behind = (items, []) if rest is None else (items[:rest], items[rest + 1 :])
    for sizes, some in ((shape, ahead), (shape[::-1], behind[::-1])):
        places = iter(sizes)
        for item in some:
            n_axes = item.ndim if isinstance(item, Tensor) and item.dtype is torch.bool else item is not None
            size = next(itertools.islice(places, max(0, n_axes - 1), None), 0) if n_axes else 0
            if isinstance(item, slice):
                yield size, item


def rows_to_try(found: Iterable[tuple[int, int]], n_rows: int, most: int = MOST) -> set[int]:
    """How many rows come to the ``found`` places, of axes that rows lie along, so many ``n_rows`` of them."""
    rows = (place * n_rows // size for place, size in found if size and size % n_rows == 0)
    return {n for n in rows if n_rows < n <= most}
