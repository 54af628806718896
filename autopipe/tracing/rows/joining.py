"""How outputs that whole numbers or sums of rows make up are joined of those of the pieces of a batch.

Whole numbers may say which rows they are of (``nonzero``, ``arange(len(x))``), so that each row ahead adds as
much to them, or how many there are (``len(x)``), so that those of the pieces add up. Vectors without rows may
be means over rows. Single floating-point numbers are told by ``results``, beside those that are 0 for the
rows it asks; joining is left to ``runtime``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...graph import Dim
from ...units import Size
from ..calls.call import Call, Depends
from ..calls.faults import of_models
from .results import ALLOWED, EQUAL, Results, axes, is_close, is_number, level_of, other_axes

__all__ = ["joining"]

_logger = logging.getLogger("autopipe")
_OF_NUMBERS = {torch.float64: ALLOWED[torch.float64], torch.float32: EQUAL[torch.float32]}
"""Of a plain number: means of single ones hardly round, and what is made of a mean may be near one itself."""
_Shapes = Mapping[int, tuple[tuple[Size, ...], ...]]


def joining(
    samples: Iterable[Results], dim: Dim, shapes: _Shapes, *, takes_more: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """What each row ahead adds to the outputs of whole numbers that have rows, and what others are of rows.

    Both by name. What is added comes behind the axis of rows, a list where it is one number for each place of
    a row's value; None where rows are not made so: an order of them (``argsort``), say. Outputs that do
    not hang on rows are not in the second; those that do are a ``"sum"``, a ``"mean"``, ``"neither"``, or
    ``"unknown"``, as rows tried here lack what is counted. Asked of ``samples`` of two rows alone, and of
    three where the form ``takes_more``; of a further one where those before lack what is counted.
    """
    steps: dict[str, Any] = {}
    made: dict[str, str] = {}
    untold: Collection[str] | None = None
    for sample in samples:
        try:
            untold = _ask(sample, dim, shapes, takes_more, steps, made, untold)
        except of_models() as error:
            # any Python of the model, on rows that it may not take
            _logger.debug("how outputs of pieces are joined could not be told: %s", error)
        if not (untold is None or untold):
            break
    return steps, made


def _ask(
    both: Results,
    dim: Dim,
    shapes: _Shapes,
    takes_more: bool,
    steps: dict[str, Any],
    made: dict[str, str],
    names: Collection[str] | None,
) -> set[str]:
    """Note what a sample tells of outputs by these ``names``, or of all; those of which it tells nothing."""
    asked = [
        (i, call, at)
        for i, call in enumerate(both.leaves)
        if (names is None or call.name in names)
        and _is_asked(both.of("ab")[i], at := _row_axes(call, dim, shapes), is_anew=names is not None)
    ]
    orders = ("aa", "bb", "ab", "ba", *(["bab"] if takes_more else []))
    given = {rows: both.placed(rows) for rows in orders} if asked else {}
    untold = set[str]()
    for i, call, at in asked if both.is_by_row else ():
        values = {rows: _tensor(leaves[i], _dtype_behind(call)) for rows, leaves in given.items()}
        at = at or _varying(values)
        if _tells_nothing(values, call, at):
            untold.add(call.name)
        if at:
            step = _step(values, at[0])
            steps.pop(call.name, None)
            if step is None and _is_of_blocks(values, at[0]):
                continue
            if step is None or step.any() or at != axes(call, 0, dim, shapes):
                steps[call.name] = None if step is None else (at[0], step.tolist())
        else:
            allowed = ALLOWED if isinstance(both.of("ab")[i], Tensor) else _OF_NUMBERS
            how = "unknown" if call.name in untold else _made_of_rows(values, allowed)
            if how == "mean" and allowed is _OF_NUMBERS and not _are_apart(values, allowed):
                how = "unknown"
                untold.add(call.name)
            if how == "neither" and not (
                call.depends & Depends.INPUT or isinstance(both.of("ab")[i], Tensor)
            ):
                how = "unknown"  # sizes alone tell it
            made.pop(call.name, None)
            if how and not (is_number(values["ab"]) and is_number(both.of("ab")[i]) and how != "sum"):
                made[call.name] = how
    return untold


def _tells_nothing(values: Mapping[str, Tensor], call: Call, at: Sequence[int]) -> bool:
    """Whether rows a and b have no place along such axes, or count nought: what they lack others may have."""
    if at:
        return not (values["aa"].shape[at[0]] or values["bb"].shape[at[0]])
    is_truth = values["ab"].dtype is torch.bool
    return bool(call.depends & Depends.INPUT) and not (
        is_truth or any(bool(t.any()) for t in values.values())
    )


def _row_axes(call: Call, dim: Dim, shapes: _Shapes) -> list[int]:
    """The axes that are rows of the batch, or as long as these make them."""
    return axes(call, 0, dim, shapes) + [axis for axis, _ in other_axes(call, dim, shapes)]


def _varying(values: Mapping[str, Tensor]) -> list[int]:
    """The axis of whole numbers that is as long as data make it, if there is one."""
    shapes = [t.shape for t in values.values()]
    if values["ab"].is_floating_point() or len({len(shape) for shape in shapes}) > 1:
        return []
    found = [axis for axis, sizes in enumerate(zip(*shapes, strict=True)) if len({*sizes}) > 1]
    return found if len(found) == 1 else []


def _tensor(value: Any, dtype: torch.dtype = torch.float64) -> Any:
    """A value, as a tensor where it is a number: of such a ``dtype`` if it is no whole one."""
    if type(value) not in (int, float, bool):
        return value
    return torch.tensor(value, dtype=dtype if type(value) is float else None, device="cpu")


def _dtype_behind(call: Call) -> torch.dtype:
    """The narrowest dtype of the tensors that a number is made of, up to whose rounding it is known."""
    found, todo, seen = [torch.float64], [call], set[int]()
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if not isinstance(each.value, Tensor):
            todo += each.inputs
        elif each.value.is_floating_point():
            found.append(each.value.dtype)
    return max(found, key=lambda dtype: torch.finfo(dtype).eps)


def _is_asked(given: Any, at: Sequence[int], *, is_anew: bool) -> bool:
    """Whether a value with rows along such axes is asked; ``results`` asks floats with rows, and numbers.

    Of numbers it does where they are not 0, so that these are asked ``is_anew``, of other rows.
    """
    value = _tensor(given)
    if not isinstance(value, Tensor) or value.is_nested or value.is_complex():
        return False
    is_known = is_number(given) and not is_anew and bool(value.any())
    is_told = value.is_floating_point() and (at or is_known)
    return len(at) < 2 and not is_told and value.layout is torch.strided


def _step(values: Mapping[str, Tensor], axis: int) -> Tensor | None:
    """What each row ahead adds to a row's whole numbers along an axis; None where that is not what does."""
    told = {rows: t.to(torch.int64).movedim(axis, 0) for rows, t in values.items()}
    firsts: dict[str, Tensor] = {}
    added: list[Tensor] = []
    for row in "ab":
        first, second = told[row * 2].tensor_split([len(told[row * 2]) // 2])
        if first.shape != second.shape:
            return None
        firsts[row] = first
        added += [*(second - first)]
    if not added or not all(torch.equal(added[0], each) for each in added):
        return None
    for rows, found in told.items():
        each = [firsts[row] + added[0] * i for i, row in enumerate(rows)]
        if not torch.equal(torch.cat(each), found):
            return None
    return added[0]


def _are_apart(values: Mapping[str, Tensor], allowed: Mapping[torch.dtype, float]) -> bool:
    """Whether numbers of two rows are so unlike that what bends, as an exponential, is seen to be no mean.

    That is off by about an eighth of the square of how far they are apart.
    """
    a, b = float(values["aa"]), float(values["bb"])
    return abs(a - b) > 10 * math.sqrt(level_of(values["ab"].dtype, allowed)) * max(abs(a), abs(b))


def _is_of_blocks(values: Mapping[str, Tensor], axis: int) -> bool:
    """Whether whole numbers are of single rows, with one place of all of them, then another."""
    if any(not t.shape[axis] or t.shape[axis] % len(rows) for rows, t in values.items()):
        return False
    each = {rows: t.unflatten(axis, (-1, len(rows))) for rows, t in values.items()}
    step = _step(each, axis + 1)
    return step is not None and not step.any()


def _made_of_rows(values: Mapping[str, Tensor], allowed: Mapping[torch.dtype, float]) -> str:
    """Whether a value is a ``"sum"`` or an even ``"mean"`` over rows, or ``"neither"``; empty where it stays.

    ``"unknown"`` where two rows do not tell a mean from a sum. It is up to what is ``allowed`` by dtype.
    """
    if len({(t.shape, t.dtype) for t in values.values()}) > 1:
        return "neither"
    kind = values["ab"].dtype
    told = {rows: t.double() for rows, t in values.items()}
    if all(torch.equal(told["ab"], t) for t in told.values()):
        return ""
    level = {torch.float64: level_of(kind, allowed) if kind.is_floating_point else 0.0}

    def is_as(expected: Callable[[Tensor], Tensor]) -> bool:
        each = {rows: expected(torch.stack([told[row * 2] for row in rows])) for rows in told}
        return all(is_close(found, each[rows], level) for rows, found in told.items())

    is_sum = kind is not torch.bool and is_as(lambda rows: rows.sum(0) / 2)
    is_mean = kind.is_floating_point and is_as(lambda rows: rows.mean(0))
    if (is_sum or is_mean) and "bab" not in values:
        return "unknown"
    return "sum" if is_sum else "mean" if is_mean else "neither"
