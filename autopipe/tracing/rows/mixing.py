"""Whether rows of a batch depend on one another, and which op mixes them: rows are put in others' places.

A graph is run on rows a b, a a and b b. Where rows are alone, a is the same beside b as beside a, and a
number made from all rows (a mean loss) is the mean of what it is for each: an even one, or one over labels,
which can be counted. On rows b a b both are what they were, wherever they are and how many there are. The
random numbers are the same in each run, so noise drawn inside is no mixing. What follows for microbatches is
left to ``runtime``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...graph import Dim, batch_dim
from ...units import Size
from ..calls.call import Call, Recording
from ..calls.describe import call_and_place
from ..calls.functions import tensors
from ..calls.labels import can_be_counted, label_options
from ..sizes.rerun import replay
from ..sizes.variation import Mixing
from ..state.state import seed
from .backwards import OwnBackwards
from .by_mode import is_other_in_training
from .class_weights import by_class_weights
from .data_dependent import Change, Reading, Turn, Turned, Watch, alike, numbers_apart, reading, scales
from .noise import OwnNoise
from .order import by_order
from .pieces import fault_in_pieces
from .results import ALLOWED, COARSE, EQUAL, ROUNDED, SLIGHT, Results, Rows, axes, differ, is_close
from .thresholds import thresholds
from .varied_data import of_other_sign, of_other_weights, signed, told_otherwise, unlike

__all__ = ["mixing", "rows_of"]

_logger = logging.getLogger("autopipe")
_Shapes = Mapping[int, tuple[tuple[Size, ...], ...]]
_Look = Callable[[Call, Any], Any]
_MANY = 4


@torch.no_grad()
def mixing(
    model: nn.Module,
    forms: Mapping[bool, Recording],
    given: Mapping[str, Tensor],
    dims: Sequence[Dim],
    shapes: _Shapes,
    device: torch.device,
    start: Callable[[bool], None],
    own: OwnBackwards | None = None,
    *,
    takes: Callable[[int], bool],
) -> Mixing:
    """Run the forms on the tensors ``given``, and on others like them; ``start`` sets the mode.

    A form that is asked alone, whatever mode it is of, is given as that of evaluation. ``own`` is shown the
    calls of a run with gradients where there is one.

    Where the forms are right for two rows (``takes`` tells for how many), on two alone, as only these tell
    how rows weigh. Where the graph does not run on rows in other places, it is run on pieces of the batch.
    Nothing is found on the meta device.
    """
    dim = batch_dim(dims)
    if dim is None or dim.packed or device.type == "meta":
        return Mixing()
    found: dict[bool, str] = {}
    sums: list[bool] = []
    elsewhere, own = False, own or OwnBackwards(model, dim, shapes)
    for training in sorted(forms):
        form = forms[training]
        if training and (
            found[False] or not _may_mix_in_training(model, forms, given, dim, device, start, takes, own)
        ):
            break
        begin, found[training] = functools.partial(start, training), ""
        results = functools.partial(_results, model, form, dim, shapes, device, begin)
        told = (model, form, given, dim, device, begin)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            is_sure = is_told = False
            for alone in (True, False) if takes(2) and dim.example > 2 else (False,):
                is_longer = dim.example > 2 and not alone
                try:
                    seen = results(given, alone)
                    more = takes(3 if alone else dim.example + 1)
                    found[training] = (
                        _found(seen, dim, shapes)
                        or _of_other_signs(results, form, given, alone, dim, shapes)
                        or seen.moved(dim, shapes, takes_more=more)
                        or seen.neither()
                    )
                    if not (is_longer or found[training]):
                        sums += seen.sums()
                    is_sure, is_told = not is_longer, True
                    break
                except Exception as error:
                    # any Python of the model, on rows it may not take: inputs may point to rows
                    _logger.debug("rows could not be told apart: %s", error)
            if not (training or is_sure or found[False]) and any(map(_may_point, given.values())):
                are_rows = functools.partial(axes, dim=dim, shapes=shapes)
                fault = fault_in_pieces(*told, takes=takes, rows_of=are_rows, is_close=is_close)
                if fault:
                    return Mixing(fault, points=True)
            if not (is_sure or found[training]):
                found[training] = _if_told(by_order, model, form, given, dim, shapes, device, begin)
            others = itertools.chain(
                of_other_weights(given, dim),
                told_otherwise(given, dim),
                unlike(model, form, given, dim, shapes),
            )
            found[training] = found[training] or _if_told(by_class_weights, *told)
            for rows in others if is_told else ():
                found[training] = (
                    found[training]
                    or _if_told(_of_others, results, rows, is_sure, dim, shapes)
                    or _if_told(by_class_weights, model, form, rows, dim, device, begin)
                )
            for apart in numbers_apart(form, {n for n, _ in dim.where}) if is_told and is_sure else ():
                found[training] = found[training] or _if_told(_of_numbers, results, given, apart)
            is_more, watch = is_sure and takes(2 * _MANY), Watch(model, form)
            if is_more and not found[training]:
                # what two rows do not come near to, as a largest norm, more of them may pass
                found[training] = _if_told(_of_more, results, seen, given, dim, shapes, watch)
            for n in thresholds(model, form, 2 * _MANY) if is_more else ():
                if not found[training] and takes(n + 2):
                    told_more = results, seen, given, n // 2 + 1, dim, shapes
                    found[training] = _if_told(_among_more, *told_more)
                    elsewhere = bool(found[training])
            of_read = functools.partial(_read, watch, *told, alone=is_sure, times=_MANY if is_more else 1)
            read = of_read() if is_told and not found[training] else Reading()
            for rows in unlike(model, form, given, dim, shapes, reads=True) if read.reads else ():
                if not found[training]:
                    found[training] = _if_told(_of_others, results, rows, is_sure, dim, shapes)
            if read.ranks and not found[training]:
                found[training] = _if_told(_of_alike, results, given, is_sure, dim, shapes)
            places = {id(c): a for c in form.calls if id(c) in read.given for a in axes(c, 0, dim, shapes)}
            other = functools.partial(results, given, is_sure)
            scaled = (functools.partial(other, changes=scale) for scale in scales(read, places))
            turned = (functools.partial(other, turned=turn) for turn in read.truths)
            for otherwise in itertools.chain(scaled, turned):
                if not found[training]:
                    found[training] = _if_told(_by_data, otherwise, is_more, dim, shapes)
                    elsewhere = bool(found[training])
    is_sum = bool(sums) and all(sums) and not found[False]
    return Mixing(found[False], found.get(True, ""), sums=is_sum, is_asked=bool(sums), elsewhere=elsewhere)


def _results(
    model: nn.Module,
    form: Recording,
    dim: Dim,
    shapes: _Shapes,
    device: torch.device,
    begin: Callable[[], None],
    rows: Mapping[str, Tensor],
    alone: bool,
    times: int = 1,
    changes: Change | None = None,
    turned: Turn | None = None,
    watch: Watch | None = None,
) -> Results:
    """What a form gives for two ``rows``, so many ``times`` behind one another.

    Labels are counted where all can be: of others the model may make means. ``changes`` may put other values
    in the place of calls', and truths asked for in a place may be ``turned``; ``watch`` looks at a run.
    """
    over_labels = [*filter(None, (label_options(model, call) for call in form.calls))]
    counted = over_labels if all(can_be_counted(model, options) for options in over_labels) else []
    told = (model, form, rows, dim, device, begin)
    run = rows_of(*told, alone=alone, times=times, changes=changes, turned=turned)
    run = run if watch is None else functools.partial(watch.first, run)
    is_longer = times > 1 or (dim.example > 2 and not alone)
    return Results(form, run, is_longer, counted, OwnNoise(dim, shapes, device))


def _if_told(find: Callable[..., str], *told: Any) -> str:
    """What mixes other rows, in words; nothing where the form does not take them."""
    try:
        return find(*told)
    except Exception as error:
        # any Python of the model, on data that it may not take
        _logger.debug("other rows could not be told apart: %s", error)
        return ""


def _of_others(
    results: Callable[..., Results], rows: Mapping[str, Tensor], alone: bool, dim: Dim, shapes: _Shapes
) -> str:
    """What mixes other ``rows``."""
    return _found(results(rows, alone), dim, shapes)


def _of_numbers(results: Callable[..., Results], given: Mapping[str, Tensor], apart: Change) -> str:
    """What is no mean of rows' numbers that are far ``apart``: only they differ, so that rounding is all."""
    return results(given, True, changes=apart).number_off(EQUAL)


def _of_other_signs(
    results: Callable[..., Results],
    form: Recording,
    given: Mapping[str, Tensor],
    alone: bool,
    dim: Dim,
    shapes: _Shapes,
) -> str:
    """What mixes rows of which the second has the other sign; one input after another, if not in all at once.

    A loss may take no target below zero.
    """
    names = signed(given, dim, form)
    try:
        return _of_others(results, of_other_sign(given, dim, names), alone, dim, shapes) if names else ""
    except Exception as error:
        # any Python of the model, on data that it may not take
        _logger.debug("not all inputs take the other sign: %s", error)
    one_each = (of_other_sign(given, dim, {name}) for name in names if len(names) > 1)
    return next(filter(None, (_if_told(_of_others, results, r, alone, dim, shapes) for r in one_each)), "")


def _of_more(
    results: Callable[..., Results],
    few: Results,
    given: Mapping[str, Tensor],
    dim: Dim,
    shapes: _Shapes,
    watch: Watch,
) -> str:
    """What mixes rows that come often, or gives others than for a ``few``.

    Where all is smooth that ``watch`` sees, many rows alike mix as a few do: only whether what is given hangs
    on how many they are is asked.
    """
    many = results(given, True, times=_MANY, watch=watch)
    if watch.is_smooth and not many.is_noisy and not few.among(many, _MANY, dim, shapes, ROUNDED):
        return ""
    return _found(many, dim, shapes) or few.among(many, _MANY, dim, shapes, ROUNDED)


def _among_more(
    results: Callable[..., Results],
    few: Results,
    given: Mapping[str, Tensor],
    times: int,
    dim: Dim,
    shapes: _Shapes,
) -> str:
    """What gives others than for a ``few`` rows where these come so many ``times``."""
    return few.among(results(given, True, times=times), times, dim, shapes, ROUNDED)


def _of_alike(
    results: Callable[..., Results], given: Mapping[str, Tensor], alone: bool, dim: Dim, shapes: _Shapes
) -> str:
    """What mixes rows each of which is alike throughout, or makes others of them in other places."""
    found = results(alike(given, dim), alone)
    return _found(found, dim, shapes) or found.moved(dim, shapes, takes_more=False)


def _by_data(results: Callable[..., Results], is_more: bool, dim: Dim, shapes: _Shapes) -> str:
    """What mixes rows, or goes by how many they are, on data that code is to go by otherwise.

    By much: a solver that adapts its steps to a batch may differ within its tolerance. With ``is_more`` rows
    come often as well.
    """
    once = results()
    every = (once, results(times=_MANY)) if is_more else (once,)
    if not all(each.is_finite for each in every):
        return ""
    for each in every:
        if fault := each.fault(dim, shapes, COARSE):
            where = _first(each.form, each.run, dim, shapes, COARSE)
            return "; ".join(filter(None, (where, fault if each.is_number or not where else "")))
    return once.among(every[-1], _MANY, dim, shapes, COARSE) if is_more else ""


def _read(watch: Watch, *told: Any, **how: Any) -> Reading:
    """What a form goes by, which may go another way on other data."""
    _, form, *_ = told
    try:
        return reading(form, rows_of(*told, **how), watch)
    except Exception as error:
        # any Python of the model: it may not run while somebody watches what torch is asked
        _logger.debug("what code reads could not be seen: %s", error)
        return Reading()


def rows_of(
    model: nn.Module,
    form: Recording,
    given: Mapping[str, Tensor],
    dim: Dim,
    device: torch.device,
    start: Callable[[], None],
    *,
    alone: bool = False,
    times: int = 1,
    changes: Change | None = None,
    turned: Turn | None = None,
) -> Rows:
    """What runs a form on the example's first two rows in any order, the others behind them or left out.

    The order comes so many ``times``; ``start`` sets mode and state. What ``changes`` gives for a call takes
    the place of its value; the first truths that code asks for in a place come out otherwise as ``turned``.
    """

    def run(rows: str, look: _Look | None = None) -> Any:
        start()
        seed(device)
        shown = look if changes is None else functools.partial(_changed, changes, rows * times, look)
        with contextlib.nullcontext() if turned is None else Turned(turned):
            return replay(model, form, _rows(given, dim, rows * times, alone), device, look=shown).result

    return run


def _changed(changes: Change, rows: str, look: _Look | None, call: Call, value: Any) -> Any:
    other = changes(rows, call, value)
    seen = None if look is None else look(call, value if other is None else other)
    return other if seen is None else seen


def _may_point(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _may_mix_in_training(
    model: nn.Module,
    forms: Mapping[bool, Recording],
    given: Mapping[str, Tensor],
    dim: Dim,
    device: torch.device,
    start: Callable[[bool], None],
    takes: Callable[[int], bool],
    own: OwnBackwards,
) -> bool:
    form = forms[True]
    if form is not forms[False] or any(c.mutated for c in form.calls):
        return True

    def run_in(training: bool) -> Rows:
        return rows_of(model, form, given, dim, device, functools.partial(start, training), alone=takes(2))

    is_other = is_other_in_training(model, form, run_in, device, own.look)
    own.is_whole &= not is_other
    own.end()
    return is_other


def _rows(given: Mapping[str, Tensor], dim: Dim, rows: str, alone: bool) -> dict[str, Tensor]:
    """The tensors with the example's first two rows, a and b, in the order of ``rows``; made up if alike.

    The rows behind them stay, unless these are to be ``alone``. A third of ``rows`` comes last.
    """
    picked: dict[str, tuple[Tensor, Tensor, int]] = {}
    for name, axis in dim.where:
        tensor = given[name]
        a = tensor.select(axis, 0)
        picked[name] = a, tensor.select(axis, 1) if tensor.shape[axis] > 1 else a, axis
    if all(torch.equal(a, b) for a, b, _ in picked.values()):
        picked = {n: (_uneven(a), _other(_uneven(a)), axis) for n, (a, _, axis) in picked.items()}
    out = dict(given)
    for name, (a, b, axis) in picked.items():
        chosen = [a if row == "a" else b for row in rows]
        rest = () if alone else given[name].unbind(axis)[2:]
        made = torch.stack([*chosen[:2], *rest, *chosen[2:]], axis)
        out[name] = made.requires_grad_(given[name].requires_grad)
    return out


def _uneven(row: Tensor) -> Tensor:
    """The row; where all in it is one number, as in an example of zeros or ones, with others added."""
    if not row.is_floating_point() or row.numel() < 2 or row.min() != row.max():
        return row
    return row + torch.linspace(0.25, 0.75, row.numel(), device=row.device).view(row.shape).to(row.dtype)


def _other(row: Tensor) -> Tensor:
    """Another row of the same kind: numbers a little larger, tokens in another order."""
    if row.is_floating_point() or row.is_complex():
        return row * 1.25 + 0.125
    return row.roll(1, -1) if row.ndim else row


def _found(results: Results, dim: Dim, shapes: _Shapes) -> str:
    """What mixes rows in one form, in words, or nothing.

    Where results differ by little, though by more than rounding, some op must differ by more, or some number
    that a small share of goes into a loss. Where a number is the same whatever the rows, as a loss that is
    clipped, it tells nothing, and the ops are asked too.
    """
    fault = results.fault(dim, shapes, ALLOWED)
    if fault:
        where = _first(results.form, results.run, dim, shapes)
        return "; ".join(filter(None, (where, fault if results.is_number or not where else "")))
    little = results.fault(dim, shapes, EQUAL) or not results.are_telling
    where = _first(results.form, results.run, dim, shapes) if little else ""
    return where or (results.number_within() if results.number_off(SLIGHT) else "")


def _first(
    form: Recording,
    run: Callable[..., Any],
    dim: Dim,
    shapes: _Shapes,
    allowed: Mapping[torch.dtype, float] = ALLOWED,
) -> str:
    """The first call in one of whose tensors rows are mixed."""
    seen: dict[str, dict[tuple[int, int], Tensor]] = {}
    for rows in ("ab", "aa", "bb"):
        kept = seen[rows] = {}

        def look(call: Call, value: Any, kept: dict[tuple[int, int], Tensor] = kept) -> None:
            for i, tensor in enumerate(tensors(value)):
                if axes(call, i, dim, shapes):
                    kept[id(call), i] = tensor.detach().clone()

        run(rows, look)
    for call in form.calls:
        for i in range(len(shapes.get(id(call), ()))):
            values = {rows: kept.get((id(call), i)) for rows, kept in seen.items()}
            if call.op != "output" and any(differ(values, a, allowed) for a in axes(call, i, dim, shapes)):
                return call_and_place(call)
    return ""
