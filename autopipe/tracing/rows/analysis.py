"""All that a capture asks about rows: of the example's form in both modes, of each further form, of them all.

How it is found out is left to ``mixing``, ``other_answers``, ``tail`` and ``per_call_state``.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from ...graph import Dim, batch_dim
from ..calls.call import Call, Depends, Recording
from ..calls.faults import of_models
from ..calls.labels import LabelsSeen, counted_apart, several_counts, shares_are_unlike
from ..inputs.packing import apart
from ..runs.session import Session
from ..sizes.dims import axis_of
from ..sizes.variation import InEvaluation, Mixing, Tail, Variation
from .backwards import OwnBackwards, mixed_in_backward
from .held_back import RowGradients, holds_back
from .mixing import mixing, pairs_of_rows, rows_of
from .noise_of_others import shared_draws
from .one_row import fault_in_one_row
from .other_answers import FormPairs, parting, two_rows
from .per_call_state import CallsInTurn, by_backward, by_call, by_gradients, carried_by, movers
from .results import Rows
from .tail import ahead_of, find_tail
from .uneven_totals import uneven_totals

__all__ = [
    "Chosen", "answered_apart", "mixing_of", "with_rows", "with_rows_of_the_example", "with_tail_behind",
    "without_rows",
]  # fmt: skip

_logger = logging.getLogger("autopipe")

Chosen = Callable[[Mapping[str, torch.Tensor]], int | None]
"""The number of the form that inputs ask for."""

_DENSE = torch.strided, torch.jagged
_OF_INPUTS = Depends.INPUT | Depends.SHAPE
_COUNTED_APART = (
    "its loss averages over labels drawn in it, of several kinds or counted differently: microbatches have "
    "other shares"
)
_OF_OTHERS = "a microbatch finds what the backwards of others have left"


def with_rows_of_the_example(
    session: Session,
    forms: Mapping[bool, Recording],
    given: Mapping[str, torch.Tensor],
    variation: Variation,
    known: Variation | None,
) -> Variation:
    """The variation of the example's forms, by training flag, with what mixes rows and the tail behind it.

    What is ``known`` of another capture of the model is not asked again. Sparse tensors are asked about as
    dense ones: only these are cut into rows.
    """
    dims, given = apart(variation.dims, given)
    given = _dense(given)
    loose = dataclasses.replace(variation, dims=dims)
    dim, told = batch_dim(dims), (forms, given, dims, variation.shapes, session.device)
    own = None if dim is None else OwnBackwards(session.code, dim, variation.shapes)
    found = known.mixing if known else _asked(session, forms, given, variation, dims, own)
    others, calls = "", None
    if not (known or found.points):
        again, calls = (_in_turn(session, forms, given, loose, training=flag) for flag in (False, True))
        found = dataclasses.replace(found, evaluation=InEvaluation(by_call(again), carried_by(again)))
        written = by_call(calls) if calls.carrying or not found.training else ()
        said, left = ((), written) if found.training else (written, ())
        found = dataclasses.replace(found, by_call=said, left=left, carried=carried_by(calls))
        others = by_gradients(calls)
    moved = sorted(frozenset[str]().union(*(form.moved for form in forms.values())))
    if moved and not found.carried:
        found = dataclasses.replace(found, carried=f"one call moves {', '.join(moved[:3])} for the next")

    def tail_from(names: Collection[str]) -> Tail:
        told_of = session.code, *told, session.start, found, names
        tail = find_tail(*told_of, takes=variation.takes_rows, n_rows=session.n_rows)
        if tail.ops and _held_back_ahead(session, forms[False], given, variation, tail):
            return Tail(obstacle="gradients ahead of what follows hang on all rows")
        return tail

    counted: dict[str, None] = {}
    uneven: dict[str, str] = {}
    for form in {id(form): form for form in forms.values()}.values():
        apart_in = counted_apart(session.model, form.calls, variation.shapes)
        counted |= dict.fromkeys(apart_in or _counted_unlike(session, form, given, variation, dims))
        uneven |= _uneven(session, form, given, variation, dims)
    tail, is_refused = tail_from({*counted, *uneven}), found.points
    if tail.ops and not found.always and (counted or uneven):
        found = dataclasses.replace(found, always=_COUNTED_APART if counted else next(iter(uneven.values())))
    is_refused |= bool(found.always and not tail.ops)
    is_asked = known is not None and not (known.mixing.always and not known.tail.ops)  # else it was refused
    if own is not None and not is_refused and (not is_asked or found.gathered):
        mixed = _in_backward(session, forms, given, loose, own, tail, found)
        if mixed and (longer := tail_from(mixed)).ops:
            tail, found = longer, dataclasses.replace(found, gathered=True)
            mixed = _in_backward(session, forms, given, loose, own, tail, found)
        found = dataclasses.replace(found, backward=next(iter(mixed.values()), ""))
    if found.by_call and tail.ops:
        # what writes in the tail runs once; batch norm ahead of it is told of as such
        left = () if found.carried or tail.before else _left_ahead(forms[True], found.by_call, tail)
        found = dataclasses.replace(found, by_call=left)
    if (in_evaluation := found.evaluation).by_call and tail.ops:
        left = () if in_evaluation.carried else _left_ahead(forms[False], in_evaluation.by_call, tail)
        found = dataclasses.replace(found, evaluation=dataclasses.replace(in_evaluation, by_call=left))
    if not all(_moves_inside(form, tail) for form in forms.values()):
        found = dataclasses.replace(found, by_call=tuple(dict.fromkeys((*found.by_call, *moved))))
    if remade := sorted(session.runs.repeats.remade):
        found = dataclasses.replace(found, always=f"each call makes {', '.join(remade[:3])} anew")
        tail = Tail(obstacle="the gradients of what a microbatch replaces are lost")
    if calls is not None and own is not None and (own.found or own.without_rows):
        left, read = by_backward(calls)
        found = dataclasses.replace(found, by_call=tuple(dict.fromkeys((*found.by_call, *left))))
        others = others or read
    if others or (known is not None and known.tail.obstacle == _OF_OTHERS):
        found = dataclasses.replace(found, always=others or found.always)
        tail = Tail(obstacle=_OF_OTHERS)
    if not known:
        found = _of_one_row(session, forms, given, loose, tail, found)
        told_of = session, given, variation, dims
        drawn = {flag: _shared_draws(form, *told_of, training=flag) for flag, form in forms.items()}
        in_evaluation = dataclasses.replace(found.evaluation, shared_draws=drawn[False])
        found = dataclasses.replace(found, shared_draws=drawn[True], evaluation=in_evaluation)
    return dataclasses.replace(variation, mixing=found, tail=tail)


def _in_turn(
    session: Session,
    forms: Mapping[bool, Recording],
    given: Mapping[str, torch.Tensor],
    variation: Variation,
    *,
    training: bool,
) -> CallsInTurn:
    snapshot = session.runs.snapshot
    told_of = session.code, forms[training], given, variation, session.device, session.start
    generators = snapshot.reached.own_generators
    return CallsInTurn(
        *told_of,
        lambda: snapshot.is_unchanged,
        generators,
        training=training,
        is_moved=lambda: training in snapshot.moved,
    )


def _shared_draws(
    form: Recording,
    session: Session,
    given: Mapping[str, torch.Tensor],
    variation: Variation,
    dims: Sequence[Dim],
    *,
    training: bool,
) -> tuple[str, ...]:
    """See :func:`shared_draws`; nothing where the form does not run on two rows and on three.

    Nor where it was seen to draw nothing for two.
    """
    if (form.calls[-1], training) in session.code.gave:
        return ()
    run = _on_two(session, form, given, variation, dims, training)
    if run is None or not variation.takes_rows(3):
        return ()
    return shared_draws(session.code, form, run, session.device)


def _left_ahead(form: Recording, names: Sequence[str], tail: Tail) -> tuple[str, ...]:
    """Those of the buffers and numbers by ``names`` that a form may write ahead of its tail."""
    held = {c.target: c.storages for c in form.calls if c.op == "get_attr"}
    ahead = [c for c in form.calls if c.name not in tail.ops]
    writes = frozenset[int]().union(*(c.writes for c in ahead))
    mutated, seen = ({n for c in calls for n in c.mutated} for calls in (ahead, form.calls))
    return tuple(
        n
        for n in names
        if n in mutated or not writes.isdisjoint(held.get(n, ())) or n not in held.keys() | seen
    )


def _uneven(
    session: Session,
    form: Recording,
    given: Mapping[str, torch.Tensor],
    variation: Variation,
    dims: Sequence[Dim],
) -> dict[str, str]:
    """See :func:`uneven_totals`; nothing where rows are not told apart, or the form does not run on two."""
    dim, run = batch_dim(dims), _on_two(session, form, given, variation, dims)
    if dim is None or run is None:
        return {}
    told = dim, variation.shapes, session.device
    return uneven_totals(session.code, form, given, run, *told, takes_three=variation.takes_rows(3))


def _counted_unlike(
    session: Session,
    form: Recording,
    given: Mapping[str, torch.Tensor],
    variation: Variation,
    dims: Sequence[Dim],
) -> tuple[str, ...]:
    """Names of the means over labels of which rows of the example have other shares than of one another.

    None where labels do not tell, or the form does not run on two rows.
    """
    means, dim, counts = several_counts(session.model, form.calls), batch_dim(dims), []
    if not means or dim is None:
        return ()
    for pair in pairs_of_rows(given, dim):
        run = _on_two(session, form, pair, variation, dims)
        if run is None:
            return ()
        for rows in ("aa", "bb"):
            seen = LabelsSeen(options for _, options in means)
            try:
                run(rows, seen.look)
            except of_models() as error:  # any Python of the model, on rows it may not take
                _logger.debug("labels of rows could not be counted: %s", error)
                return ()
            counts.append(seen.counts())
    return tuple(name for name, _ in means) if shares_are_unlike(counts) else ()


def _on_two(
    session: Session,
    form: Recording,
    given: Mapping[str, torch.Tensor],
    variation: Variation,
    dims: Sequence[Dim],
    training: bool | None = None,
) -> Rows | None:
    """What runs a form on two rows alone, or on few; None where it does not, or no rows are told apart.

    In the mode that it is of, or another that it is for too.
    """
    dim = batch_dim(dims)
    if dim is None or dim.packed or session.device.type == "meta" or not variation.takes_rows(2):
        return None
    start = functools.partial(session.start, form.training if training is None else training)
    return rows_of(session.model, form, given, dim, session.device, start, alone=True)


def _moves_inside(form: Recording, tail: Tail) -> bool:
    """Whether all that moves parameters runs once, on the whole batch."""
    return {c.name for c in movers(form)} <= {*tail.ops}


def _of_one_row(
    session: Session,
    forms: Mapping[bool, Recording],
    given: Mapping[str, torch.Tensor],
    variation: Variation,
    tail: Tail,
    found: Mixing,
) -> Mixing:
    """The mixing with what a batch of one row is in other ways than as one row of several."""
    asked = (fault_in_one_row(session, f, given, variation, tail.ops, mode) for mode, f in forms.items())
    return dataclasses.replace(found, one_row=next(filter(None, asked), ""))


def _held_back_ahead(
    session: Session,
    form: Recording,
    given: Mapping[str, torch.Tensor],
    variation: Variation,
    tail: Tail,
) -> bool:
    """Whether what a tail takes has gradients that mix rows; not so where noise is drawn, or none is run."""
    dim = batch_dim(variation.dims)
    if dim is None or not holds_back(session.code, form) or any(c.is_random for c in form.calls):
        return False
    more = [2] if variation.takes_rows(2) and variation.takes_rows(4) else []
    inside = [c for c in form.calls if c.name in tail.ops or c.op == "output"]
    taken = [c for call in inside for c in call.inputs if c.name not in tail.ops]
    start = functools.partial(session.start, form.training)
    run = rows_of(session.model, form, given, dim, session.device, start, alone=variation.takes_rows(2))
    try:
        return bool(RowGradients(session.model, run, taken, tuple, dim, variation.shapes).fault(more))
    except of_models() as error:  # any Python of the model, on rows it may not take
        _logger.debug("gradients ahead of a tail could not be told apart: %s", error)
        return False


def _in_backward(
    session: Session,
    forms: Mapping[bool, Recording],
    given: Mapping[str, torch.Tensor],
    variation: Variation,
    own: OwnBackwards,
    tail: Tail,
    found: Mixing,
) -> dict[str, str]:
    """What mixes rows in the backward ahead of the tail, by name; nothing where it cannot be told.

    In training, or else in evaluation where training was ``found`` to mix rows there, as batch norm does:
    that mixes the gradients of whatever is behind it, and is told of by itself.
    """
    dim, device = batch_dim(variation.dims), session.device
    if dim is None or dim.packed or device.type == "meta":
        return {}
    alone = variation.takes_rows(2)

    def run_in(training: bool) -> Rows:
        start = functools.partial(session.start, training)
        return rows_of(session.model, forms[training], given, dim, device, start, alone=alone)

    more = variation.takes_rows(3 if alone else dim.example + 1)
    try:
        is_told = bool(tail.before if tail.ops else found.training)
        if is_told and True in forms:
            own.see(forms[True], run_in(True))  # for what is asked of backwards that training alone has
            own = OwnBackwards(session.code, dim, variation.shapes)
        training = not is_told and True in forms
        if training not in forms:
            return {}
        return mixed_in_backward(forms[training], run_in(training), own, tail.ops, takes_more=more)
    except of_models() as error:  # any Python of the model, on rows it may not take
        _logger.debug("backwards could not be told apart: %s", error)
        return {}


def with_rows(
    session: Session,
    form: Recording,
    given: Mapping[str, torch.Tensor],
    variation: Variation,
    first: Variation,
    *,
    is_shared: bool,
) -> Variation:
    """The variation of a form with what mixes its rows; ``first`` is that of the first form, with the tail.

    Not asked where rows are mixed in the first form: then they are refused, or the tail has the batch. One
    that ``is_shared`` by both modes is asked in both, as the first is.
    """
    known, tail, mixed = first.mixing, first.tail, Mixing()
    dims, given = apart(variation.dims, given)
    loose, dim = dataclasses.replace(variation, dims=dims), batch_dim(dims)
    own = None if dim is None else OwnBackwards(session.code, dim, variation.shapes)
    if not known.always:
        if is_shared:
            found = _asked(session, {False: form, True: form}, given, variation, dims, own)
            mixed = dataclasses.replace(_of_any_mode(found), always=found.always, training=found.training)
        else:
            found = _asked(session, {form.training: form}, given, variation, dims)
            said, in_training = found.always, found.always if form.training and known.training else ""
            mixed = dataclasses.replace(
                _of_any_mode(found), always="" if in_training else said, training=in_training
            )
    modes = (False, True) if is_shared else (form.training,)
    if own is not None and not mixed.always and (tail.ops or not known.always):
        backward = _in_backward(session, dict.fromkeys(modes, form), given, loose, own, tail, mixed)
        mixed = dataclasses.replace(mixed, backward=next(iter(backward.values()), ""))
    if not (mixed.training or _moves_inside(form, tail)):
        mixed = dataclasses.replace(mixed, training=f"each call moves {', '.join(sorted(form.moved)[:3])}")
    mixed = _of_one_row(session, dict.fromkeys(modes, form), given, loose, tail, mixed)
    return dataclasses.replace(variation, mixing=mixed)


def _of_any_mode(found: Mixing) -> Mixing:
    """What a further form does to rows beside mixing them in a mode."""
    return Mixing(beyond=found.beyond, unasked=found.unasked, nearly=found.nearly)


def mixing_of(
    session: Session,
    forms: Mapping[bool, Recording],
    given: Mapping[str, torch.Tensor],
    variation: Variation,
    tail: Tail,
) -> Mixing:
    """How rows depend on one another in a form, by training flag where it is one of both modes.

    Ahead of the ``tail``, where it is run on the whole batch.
    """
    forms = ahead_of(forms, tail) if tail.ops else forms
    dims, given = apart(variation.dims, given)
    return _asked(session, forms, _dense(given), variation, dims)


def _asked(
    session: Session,
    forms: Mapping[bool, Recording],
    given: Mapping[str, torch.Tensor],
    variation: Variation,
    dims: tuple[Dim, ...],
    own: OwnBackwards | None = None,
) -> Mixing:
    """See :func:`mixing`; of a form of one mode alone what is found has no mode."""
    start = session.start
    if len(forms) == 1:
        ((mode, form),) = forms.items()
        forms, start = {False: form}, functools.partial(_without_mode, functools.partial(start, mode))
    told = given, dims, variation.shapes, session.device
    return mixing(session.code, forms, *told, start, own, takes=variation.takes_rows, n_rows=session.n_rows)


def with_tail_behind(
    session: Session,
    forms: Mapping[bool, Sequence[Recording]],
    given: Mapping[str, torch.Tensor],
    variation: Variation,
) -> Variation:
    """The variation with what follows from where forms of a mode part in its tail, if there may be one.

    There the whole batch answers what each microbatch would answer for itself.
    """
    parts = [parting(each) for each in forms.values() if len(each) > 1]
    own, alone = (frozenset[str]().union(*each) for each in zip(*parts, strict=True))
    dims, given = apart(variation.dims, given)
    firsts = {flag: each[0] for flag, each in forms.items()}
    told = (firsts, given, dims, variation.shapes, session.device, session.start, variation.mixing)
    names = own.union(variation.tail.ops)
    tail = find_tail(session.code, *told, names, takes=variation.takes_rows, n_rows=session.n_rows)
    if not tail.ops:
        return variation
    return dataclasses.replace(variation, tail=dataclasses.replace(tail, ops=(*tail.ops, *sorted(alone))))


def answered_apart(
    pairs: FormPairs,
    forms: Sequence[Recording],
    chosen: Chosen,
    given: Mapping[str, torch.Tensor],
    variation: Variation,
    tail: Collection[str],
    device: torch.device,
) -> Variation:
    """The variation with a mixing where two rows tried here are others once each answers what both are asked.

    Where forms count other labels, each batch is looked at for itself.
    """
    dim = batch_dim(variation.dims)
    if dim is None or dim.packed or device.type == "meta" or not any(pairs.said.values()):
        return variation

    def asked_by(batch: Mapping[str, torch.Tensor]) -> Recording | None:
        number = chosen(batch)
        return None if number is None else forms[number]

    for batch_of in two_rows(given, dim, device):
        whole = asked_by(batch_of("ab"))
        if whole is None or not any(said and of == id(whole) for (_, of), said in pairs.said.items()):
            continue  # none makes something else where all of it asks for this one
        for one in map(asked_by, map(batch_of, ("aa", "bb"))):
            said = pairs.said.get((id(one), id(whole)))
            if said and one and pairs.counts_alike(one, whole, tail):
                mixed = dataclasses.replace(variation.mixing, always=said)
                obstacle = Tail(obstacle="each microbatch answers for itself")
                return dataclasses.replace(variation, mixing=mixed, tail=obstacle)
    return variation


def without_rows(form: Recording, tail: Collection[str], variation: Variation) -> set[str]:
    """Names of what the ``tail`` of a form is given that has no rows to join, and hangs on the inputs.

    The first form has none; another one may have the same call elsewhere, under a name of its own.
    """
    batch, shapes = batch_dim(variation.dims), variation.shapes

    def has_rows(call: Call) -> bool:
        held = shapes.get(id(call), ())
        return batch is None or (bool(held) and all(axis_of(shape, batch.name) is not None for shape in held))

    found: set[str] = set()
    taken: set[int] = set()
    for call in reversed(form.calls):
        is_made = call.op not in ("placeholder", "get_attr") and call.depends & _OF_INPUTS
        if is_made and id(call) in taken and call.name not in tail and not has_rows(call):
            found.add(call.name)
        if call.name in tail or call.name in found:
            taken |= {id(c) for c in call.inputs}
    return found


def _dense(given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, sparse ones as dense ones."""
    return {name: t if t.layout in _DENSE else t.to_dense() for name, t in given.items()}


def _without_mode(start: Callable[[], None], training: bool) -> None:
    start()
