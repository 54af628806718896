"""Whether a form gives for pieces of a batch what it gives for all of it: inputs may point to rows by number.

Edges of a graph do, offsets of bags, and indices into what is beside them; such rows cannot change places as
``mixing`` has them do, which asks here then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...graph import Dim
from ..calls.call import Call, Recording
from ..calls.describe import call_and_place
from ..calls.faults import of_models
from ..calls.functions import tensors
from ..sizes.rerun import replay
from ..sizes.trials import first_line

__all__ = ["fault_in_pieces"]

_Batch = Mapping[str, Tensor]


@torch.no_grad()
def fault_in_pieces(
    model: nn.Module,
    form: Recording,
    given: _Batch,
    dim: Dim,
    device: torch.device,
    start: Callable[[], None],
    *,
    takes: Callable[[int], bool],
    rows_of: Callable[[Call, int], Sequence[int]],
    is_close: Callable[[Tensor, Tensor], bool],
) -> str | None:
    """In words, the first call that gives other rows for a piece, or takes none; empty where there is none.

    None where no batch can be made that tells. Three runs of a form, or six. ``start`` sets mode and state,
    ``takes`` tells for how many rows it is right, ``rows_of`` the axes of a call's tensor that are rows.
    What is on the way may be as wide as its longest row; then what pieces have of it is compared.
    """
    given_out = {id(c) for c in form.calls[-1].inputs}
    whole: dict[tuple[int, int], Tensor] = {}

    def run(batch: _Batch, look: Callable[[Call, Any], None]) -> None:
        start()
        replay(model, form, batch, device, look=look)

    def keep(call: Call, value: Any) -> None:
        for i, tensor in enumerate(tensors(value)):
            if len(rows_of(call, i)) == 1:
                whole[id(call), i] = tensor.detach().clone()

    def fault(piece: _Batch, begin: int) -> str:
        seen: set[int] = set()
        other: list[Call] = []

        def is_part(call: Call, tensor: Tensor, of: Tensor, axis: int) -> bool:
            n = tensor.shape[axis]
            expected = of.narrow(axis, begin, min(n, of.shape[axis] - begin))
            if id(call) not in given_out and expected.ndim == tensor.ndim and expected.shape[axis] == n:
                here = tuple(map(slice, map(min, expected.shape, tensor.shape)))
                expected, tensor = expected[here], tensor[here]
            return expected.shape == tensor.shape and is_close(expected, tensor)

        def compare(call: Call, value: Any) -> None:
            seen.add(id(call))
            for i, tensor in enumerate(tensors(value)):
                at = id(call), i
                if at in whole and not is_part(call, tensor, whole[at], *rows_of(call, i)):
                    other.append(call)

        try:
            run(piece, compare)
        except of_models() as error:
            at = next((c for c in form.calls if id(c) not in seen), form.calls[-1])
            return f"{call_and_place(at)} does not take a piece of the batch: {first_line(error)}"
        is_noisy = any(c.is_random for c in form.calls)
        what = "gives other rows for a piece of the batch than for all of it"
        return f"{call_and_place(other[0])} {what}" if other and not is_noisy else ""

    name, axis = dim.where[0]
    is_asked = False
    for batch, pieces, is_last_resort in _ways(given, dim, takes):
        if is_last_resort and is_asked:
            continue
        whole.clear()
        try:
            run(batch, keep)
        except of_models():  # whatever it is: then these rows do not go together
            continue
        is_asked = True
        begins = (0, pieces[0][name].shape[axis])
        if found := next(filter(None, map(fault, pieces, begins)), ""):
            return found
    return "" if is_asked else None


def _ways(
    given: _Batch, dim: Dim, takes: Callable[[int], bool]
) -> Iterator[tuple[_Batch, Sequence[_Batch], bool]]:
    """A batch, and pieces that make it up: as many rows again behind those given; halves of these.

    Rows that come again come from the last to the first, so that who points to a row by number finds another.
    As a last resort, of which is told, halves of rows each of which comes twice: where they are in order, as
    lengths that packing wants, they still are.
    """
    n = dim.example

    def halves(of: _Batch, n: int) -> list[_Batch]:
        ends = (0, n // 2), (n // 2, n)
        cut = ({k: of[k].narrow(axis, first, last - first) for k, axis in dim.where} for first, last in ends)
        return [{**given, **half} for half in cut]

    if takes(2 * n):
        again = {**given, **{name: given[name].flip(axis) for name, axis in dim.where}}
        both = {name: torch.cat([given[name], again[name]], axis) for name, axis in dim.where}
        yield {**given, **both}, (given, again), False
    if n > 3 and takes(n // 2) and takes(n - n // 2):
        yield given, halves(given, n), False
    if takes(2 * n):
        twice = {name: given[name].repeat_interleave(2, axis) for name, axis in dim.where}
        yield {**given, **twice}, halves(twice, 2 * n), True
