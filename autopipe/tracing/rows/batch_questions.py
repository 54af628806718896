"""Whether rows differ when each answers by itself what a model asks of its whole batch.

A mask may be asked row by row whether it masks anything: without one, a row that is whole stays what it is.
A sum may not be asked so whether it is positive. Rows under one form are looked at in ``mixing``.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...graph import Dim, batch_dim
from ...units import Size
from ..calls.call import Call, Depends, Recording
from ..calls.describe import expression
from ..calls.labels import LabelsSeen, label_options, share_of
from ..sizes.other_masks import witnesses
from ..sizes.rerun import replay
from ..state.state import generators, seed
from .results import ROUNDED, axes, differ, is_number

__all__ = ["asked_of_all_rows", "labels_by_answer"]

_logger = logging.getLogger("autopipe")
_Batch = Mapping[str, Tensor]


@torch.no_grad()
def asked_of_all_rows(
    model: nn.Module,
    forms: Sequence[Recording],
    number_of: Callable[[_Batch], int | None],
    given: _Batch,
    dims: Sequence[Dim],
    shapes: Mapping[int, tuple[tuple[Size, ...], ...]],
    device: torch.device,
    start: Callable[[], None],
    tail: Collection[str] = (),
) -> str:
    """In words, what is asked of all rows at once and gives two rows others than each alone; or nothing.

    The ``forms`` are those of one mode, and ``number_of`` tells which of them a batch asks for, if any.
    ``start`` sets mode and state. Of the ops that run on the whole batch, by name the ``tail``, what they
    are given is compared. Not asked where noise is drawn.
    """
    dim = batch_dim(dims)
    if dim is None or dim.packed or device.type == "meta" or len(forms) < 2:
        return ""
    leaves = [c if isinstance(c, Call) and c.name not in tail else None for c in forms[0].calls[-1].args[0]]
    given_tail = _given_to(forms[0], tail)
    noisy: set[int | None] = set()

    def result(number: int | None, batch: _Batch) -> tuple[list[Any], list[float | None]]:
        """What a form gives, itself and to the tail, and what its labels weigh; one that draws is noted."""
        assert number is not None
        start()
        seed(device)
        before = generators(device)
        over_labels = filter(None, (label_options(model, call) for call in forms[number].calls))
        counted, entering = LabelsSeen(over_labels), _Named({c.name for c in given_tail})
        look = functools.partial(_shown_to, (counted, entering))
        found = replay(model, forms[number], batch, device, look=look).result
        if generators(device) != before:
            noisy.add(number)
        return [*found, *(entering.values.get(c.name) for c in given_tail)], counted.weights()

    twice = _of_pair(given, dim, "aa")
    first = number_of(twice)
    of_first = functools.cache(functools.partial(result, first, twice))
    for pair in _pairs(given, dim, device) if first is not None else ():
        batches = {rows: _of_pair(pair, dim, rows) for rows in ("ab", "bb")}
        numbers = {"aa": first} | {rows: number_of(batch) for rows, batch in batches.items()}
        used = {*numbers.values()}
        if None in used or len(used) == 1 or used & noisy:
            continue
        try:
            results = {rows: result(numbers[rows], batch) for rows, batch in batches.items()}
            results["aa"] = of_first()
        except Exception as error:
            # any Python of the model, on rows it may not take
            _logger.debug("rows could not answer for themselves: %s", error)
            continue
        if used & noisy:
            continue
        chosen = {rows: forms[number] for rows, number in numbers.items() if number is not None}
        weights = {rows: weighed for rows, (_, weighed) in results.items()}
        for i, call in enumerate((*leaves, *given_tail)):
            if call is None:
                continue
            values = {rows: found[i] for rows, (found, _) in results.items()}
            if i >= len(leaves) and None in values.values():
                return _said(chosen)  # one of these forms gives the tail nothing there
            is_other = any(differ(values, axis, ROUNDED) for axis in axes(call, 0, dim, shapes))
            if is_other or _is_no_mean(values, weights):
                return _said(chosen)
    return ""


def labels_by_answer(model: nn.Module, forms: Sequence[Recording], tail: Collection[str]) -> str:
    """In words, what is asked of all rows and tells which labels the losses ahead of a ``tail`` leave out.

    Rows that answer it as their batch does count the labels that the batch counts; others do not. Nothing is
    made of a form without such a loss: one for rows none of whose labels count may have none.
    """
    counting = [form for form in forms if _left_out(model, form, tail)]
    for form in counting[1:]:
        if _left_out(model, form, tail) != _left_out(model, counting[0], tail):
            return _said({"ab": form, "aa": counting[0], "bb": counting[0]})
    return ""


def _left_out(model: nn.Module, form: Recording, tail: Collection[str]) -> set[int]:
    """The labels that a form's losses ahead of a ``tail`` leave out."""
    found = [label_options(model, call) for call in form.calls if call.name not in tail]
    return {o["ignore_index"] for o in found if o is not None and isinstance(o["ignore_index"], int)}


def _given_to(form: Recording, tail: Collection[str]) -> list[Call]:
    """What is made before the ops of a tail and given to them."""
    found = {id(c): c for call in form.calls if call.name in tail for c in call.inputs if c.name not in tail}
    return [c for c in found.values() if c.depends & Depends.INPUT and c.op != "placeholder"]


class _Named:
    """Keeps the values of calls by name."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.values: dict[str, Any] = {}

    def look(self, call: Call, value: Any) -> None:
        """Keep a value, as it is now, that is asked for."""
        if call.name in self._names:
            self.values[call.name] = value.clone() if isinstance(value, Tensor) else value


def _shown_to(those: Sequence[LabelsSeen | _Named], call: Call, value: Any) -> None:
    for each in those:
        each.look(call, value)


def _pairs(given: _Batch, dim: Dim, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Batches of two rows: the example's first, and another of its own or of other data.

    On an accelerator none that may point out of a table: what fails so there ends all work of the process.
    """
    contrary = {n: t.neg() if t.is_floating_point() else t for n, t in given.items()}
    for other, row in ((given, -1), (contrary, 0), *((w, 0) for w in witnesses(given))):
        if device.type != "cpu" and any(_is_lower(t, given[n]) for n, t in other.items()):
            continue
        pair = dict(given)
        for name, axis in dim.where:
            pair[name] = torch.stack([given[name].select(axis, 0), other[name].select(axis, row)], axis)
        yield pair


def _is_lower(other: Tensor, given: Tensor) -> bool:
    """Whether whole numbers are negative that were not."""
    is_whole = other.dtype.is_signed and not (other.is_floating_point() or other.is_complex())
    return is_whole and other.numel() > 0 and int(other.min()) < min(0, int(given.min()))


def _of_pair(pair: _Batch, dim: Dim, rows: str) -> dict[str, Tensor]:
    """The batch with its two rows, a and b, in the order of ``rows``."""
    out = dict(pair)
    for name, axis in dim.where:
        out[name] = torch.stack([pair[name].select(axis, "ab".index(row)) for row in rows], axis)
    return out


def _is_no_mean(values: Mapping[str, object], weights: Mapping[str, Sequence[float | None]]) -> bool:
    """Whether a number of two rows is no mean of what it is for each, evenly or as labels weigh them."""
    if not all(map(is_number, values.values())):
        return False
    ab, aa, bb = (float(values[rows]) for rows in ("ab", "aa", "bb"))  # type: ignore[arg-type]
    if not all(map(math.isfinite, (ab, aa, bb))):
        return False
    allowed = ROUNDED.get(values["ab"].dtype, 0.1)  # type: ignore[attr-defined]
    share = share_of(weights["aa"], weights["bb"])
    return share is not None and abs(ab - share * aa - (1 - share) * bb) > allowed * max(
        map(abs, (ab, aa, bb))
    )


def _said(chosen: Mapping[str, Recording]) -> str:
    """The first question that both rows together answer otherwise than one of them."""
    together = chosen["ab"]
    for alone in (chosen["aa"], chosen["bb"]):
        for one, other in zip(together.branches, alone.branches, strict=False):
            if one.outcome != other.outcome:
                return f"{one.source} asks {expression(one.read.args)} of all rows at once"
    return "what is read of the inputs is read of all rows at once"
