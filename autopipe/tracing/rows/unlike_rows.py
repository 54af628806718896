"""Whether rows that are all unlike one another are, in half of a batch, what they are in all of it.

Of two rows, however often these come, the median is one of both, the sign of a mean is often that of each,
and their span has no more than two directions. Which forms are asked is left to ``row_questions``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, dtype, nn

from ...graph import Dim
from ...units import Size
from ..calls.call import Call, Depends, Recording, map_calls
from ..calls.describe import call_and_place
from ..calls.functions import plain_name, tensors
from ..calls.likeness import is_equal
from ..calls.perform import run_call
from ..inputs.structure import mapped
from ..sizes.rerun import replay
from .alike_layers import AlikeLayers
from .results import ALLOWED, Rows, axes, is_as_recorded, is_close, is_floating, is_number, run_until

__all__ = ["fault_among_unlike", "gathered", "that_stay", "width"]

_Level = Mapping[dtype, float]
_Shapes = Mapping[int, tuple[tuple[Size, ...], ...]]
_FACTORS = 1.0, 2.0, 0.5, 1.5, 0.25, 0.75, 1.25, 1.75
"""What rows are taken times, one after another; those of the second half are of the other sign."""
_BACK = -1.25
"""What the first half's are taken times, for the second to have a mean of the other sign."""
_SPANNING = frozenset({
    "linalg_lstsq", "linalg_pinv", "linalg_qr", "linalg_svd", "lstsq", "orthogonal", "pinv", "pinverse", "qr",
    "svd",
})  # fmt: skip
"""Functions of the directions that rows span: of fewer rows than these are wide, all."""


def gathered(
    form: Recording, dim: Dim, shapes: _Shapes, stays: Collection[int] = ()
) -> dict[int, int] | None:
    """The calls of whose rows something without rows is made that other rows go by; None if there is none.

    Each by id, with the axis along which its rows lie. Where rows change their axis, what is made of them
    along it is not told from rows: then there is something, of no call that is known. Calls that ``stays``
    has, by id, give the same whatever rows hold.
    """
    sources: dict[int, frozenset[int]] = {}
    places: dict[int, int] = {}
    found: set[int] = set()
    is_turned = False
    for call, known, with_rows in _with_rows(form, dim, shapes):
        of = frozenset[int]().union(*(sources.get(id(c), ()) for c in call.inputs))
        if known:
            found |= of
            places[id(call)] = known[0][0]
            is_turned |= call.op != "placeholder" and any(
                a != [places[id(c)]] for c in with_rows for a in known
            )
        elif call.op != "placeholder" and call.depends & Depends.INPUT:
            sources[id(call)] = of if id(call) in stays else of | {id(c) for c in with_rows}
    return {number: places[number] for number in found} if found or is_turned else None


def _with_rows(
    form: Recording, dim: Dim, shapes: _Shapes
) -> Iterator[tuple[Call, list[list[int]], list[Call]]]:
    """Each call with the axes of those of its tensors that have rows, and what it takes that has them."""
    have: set[int] = set()
    for call in form.calls[:-1]:
        each = (axes(call, i, dim, shapes) for i in range(len(shapes.get(id(call), ()))))
        known = [a for a in each if a]
        yield call, known, [c for c in call.inputs if id(c) in have and is_floating(c.value)]
        if known:
            have.add(id(call))


def that_stay(
    model: nn.Module, form: Recording, run: Rows, dim: Dim, shapes: _Shapes, device: torch.device
) -> set[int]:
    """Ids of the calls without rows that take some, of floats, and give the same whatever these hold.

    As angles do that are of the type of a hidden state. ``run`` runs the form; beside it each such call runs
    alone, on other numbers and on none. Those that leave anything behind do not tell.
    """
    every = [*_with_rows(form, dim, shapes)]
    fed: set[Call] = set()
    for call, known, _ in reversed(every):
        fed |= {*call.inputs} if known or call in fed else set()
    asked = {
        call: {id(c) for c in with_rows}
        for call, known, with_rows in every
        if with_rows and not known and call in fed and not form.leaves_anything(call)
    }
    taken = {c for call in asked for c in call.inputs}
    values: dict[Call, Any] = {}
    found: set[int] = set()

    def look(call: Call, value: Any) -> None:
        if call in taken:
            values[call] = value
        if call in asked and all(is_equal(value, made) for made in _of_others(call)):
            found.add(id(call))

    def _of_others(call: Call) -> Iterator[Any]:
        for other in _OTHERS:
            held = {c: mapped(other, v) if id(c) in asked[call] else v for c, v in values.items()}
            args, kwargs = (map_calls(given, held.__getitem__) for given in (call.args, call.kwargs))
            yield run_call(model, form.constants, call, args, kwargs, {}, device)

    if asked:
        run_until(run, "ab", [*asked][-1], look)
    return found


def _none(value: Any) -> Any:
    return torch.full_like(value, float("nan")) if is_floating(value) else value


def _far(value: Any) -> Any:
    return value * -1024 if is_floating(value) else value


_OTHERS = _none, _far


def width(form: Recording) -> int:
    """How wide rows may be of which a form takes what they span; nought where it takes none."""
    spanning = [c for c in form.calls if plain_name(c) in _SPANNING]
    return max(
        (size for c in spanning for i in c.inputs for t in tensors(i.value) for size in t.shape), default=0
    )


@torch.no_grad()
def fault_among_unlike(
    model: nn.Module,
    form: Recording,
    given: Mapping[str, Tensor],
    dim: Dim,
    shapes: _Shapes,
    start: Callable[[], None],
    n: int,
    spread: Mapping[int, int],
    allowed: _Level,
    *,
    is_counted: bool,
    own: Collection[Call] = (),
    alike: AlikeLayers | None = None,
) -> str:
    """In words, the first call that gives other rows in half of a batch of ``n`` than in all; or nothing.

    Values of calls that are ``spread``, with their axes, are in the second half those of the first with
    another sign, or else the inputs have another there. Not of calls whose rows lie in another order in a
    half than in all, as those that are packed by length do. Of numbers that labels weigh, which
    ``is_counted``, the rows are compared that they are made of. Nothing where something comes out that is no
    number. Of layers that are ``alike`` one runs for all. Where what comes out is off by less than is
    ``allowed``, though by more than rounding, rows of the model's ``own`` calls must not be off by so much.
    """
    batch = _unlike(given, dim, n, is_signed=not spread)
    device = next(iter(batch.values())).device
    put: dict[int, Tensor] = {}
    came: list[dict[int, Tensor]] = []

    def run(begin: int, end: int) -> tuple[dict[tuple[int, int], Tensor], list[Any]]:
        kept: dict[tuple[int, int], Tensor] = {}
        came.append({})

        def look(call: Call, value: Any) -> Any:
            axis, other = spread.get(id(call)), None
            if axis is not None and is_as_recorded(call, value):
                came[-1][id(call)] = value.detach().clone()
                if id(call) not in put:
                    put[id(call)] = _there_and_back(value, axis, n)
                other = put[id(call)].narrow(axis, begin, end - begin)
            made = value if other is None else other
            kept.update(((id(call), i), t.detach().clone()) for i, t in enumerate(tensors(made)))
            return other

        start()
        piece = {**batch, **{name: batch[name].narrow(axis, begin, end - begin) for name, axis in dim.where}}
        result = replay(model, form, piece, device, alike.sharing() if alike else None, look=look).result
        return kept, [v for c, v in zip(form.calls[-1].args[0], result, strict=True) if isinstance(c, Call)]

    whole, *halves = [run(*ends) for ends in ((0, n), (0, n // 2), (n // 2, n))]

    def is_other(of: Tensor, parts: Sequence[Tensor], axis: int, level: _Level = allowed) -> bool:
        joined = torch.cat([*parts], axis)
        return joined.shape == of.shape and not is_close(of, joined, level)

    def is_moved(number: int) -> bool:
        of, *parts = (own.get(number) for own in came)
        return of is not None and is_other(of, [t for t in parts if t is not None], spread[number])

    in_order = {number: axis for number, axis in spread.items() if not is_moved(number)}
    if len(in_order) < len(spread):
        told = model, form, given, dim, shapes, start, n, in_order, allowed
        options: dict[str, Any] = {"is_counted": is_counted, "own": own, "alike": alike}
        return fault_among_unlike(*told, **options) if in_order else ""
    made = [t for _, values in (whole, *halves) for v in values for t in tensors(v) if not t.is_nested]
    if not all(bool(t.isfinite().all()) for t in made):
        return ""

    def differs(call: Call, i: int, of: Any, parts: Sequence[Any], level: _Level = allowed) -> bool:
        if not all(isinstance(t, Tensor) and not t.is_nested for t in (of, *parts)):
            return False
        return any(is_other(of, parts, axis, level) for axis in axes(call, i, dim, shapes)[:1])

    def differs_within(call: Call, i: int) -> bool:
        of, *parts = (kept.get((id(call), i)) for kept, _ in (whole, *halves))
        return differs(call, i, of, parts)

    def is_told_otherwise(level: _Level, call: Call, of: Any, *parts: Any) -> bool:
        if not is_number(of) or call.op == "placeholder":
            return differs(call, 0, of, parts, level)
        if is_counted:
            return any(differs_within(c, 0) for c in _rows_behind(call, dim, shapes))
        return not any(is_close(of, (parts[0] + parts[1]) / k, level) for k in (1, 2))

    leaves = [c for c in form.calls[-1].args[0] if isinstance(c, Call)]
    each = [*zip(leaves, whole[1], *(values for _, values in halves), strict=True)]
    other = next((told[0] for told in each if is_told_otherwise(allowed, *told)), None)
    if other is None and own and any(is_told_otherwise(ALLOWED, *told) for told in each):
        made_by = ((c, i) for c in own for i in range(len(shapes.get(id(c), ()))))
        other = next((c for c, i in made_by if differs_within(c, i)), None)
    if other is None:
        return ""
    within = (c for c in form.calls[:-1] for i in range(len(shapes.get(id(c), ()))) if differs_within(c, i))
    return f"{call_and_place(next(within, other))}, among rows that are unlike"


def _rows_behind(call: Call, dim: Dim, shapes: _Shapes) -> list[Call]:
    """The calls with rows, of inputs, that one without rows is made of, through others without."""
    found: dict[Call, None] = {}
    ahead, seen = [call], {call}
    while ahead:
        for each in ahead.pop().inputs:
            if each.op != "placeholder" and each not in seen and each.depends & Depends.INPUT:
                seen.add(each)
                if any(axes(each, i, dim, shapes) for i in range(len(shapes.get(id(each), ())))):
                    found[each] = None
                else:
                    ahead.append(each)
    return [*found]


def _there_and_back(value: Tensor, axis: int, n: int) -> Tensor:
    """The first half of ``n`` rows, each times a factor, and a little more of these with the other sign."""
    half = value.narrow(axis, 0, n // 2) * _factors(value, axis, n)[: n // 2]
    return torch.cat([half, half * _BACK], axis)


def _factors(like: Tensor, axis: int, n: int) -> Tensor:
    """What each of ``n`` rows is taken times, along an axis of a tensor."""
    each = [(1 if i < n // 2 else -1) * _FACTORS[i % 8] * (1 + i // 8 / 8) for i in range(n)]
    return like.new_tensor(each).view(-1, *[1] * (like.ndim - axis - 1))


def _unlike(given: Mapping[str, Tensor], dim: Dim, n: int, *, is_signed: bool) -> dict[str, Tensor]:
    """The tensors with ``n`` rows, none like another: theirs in turn, times numbers, in other orders."""
    out = dict(given)
    for name, axis in dim.where:
        rows = given[name].detach().unbind(axis)
        made = torch.stack([_rolled(rows[i % len(rows)], i // len(rows)) for i in range(n)], axis)
        if made.is_floating_point():
            factors = _factors(made, axis, n)
            made = made * (factors if is_signed else factors.abs())
        out[name] = made
    return out


def _rolled(row: Tensor, by: int) -> Tensor:
    return row.roll(by, -1) if row.ndim else row
