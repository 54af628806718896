"""All that a capture asks about rows: of the example's form in both modes, of each further form, of them all.

How it is found out is left to ``mixing``, ``other_answers``, ``by_count``, ``tail``, ``per_call_state`` and
``batch_questions``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from ...graph import batch_dim
from ..calls.call import Call, Depends, Recording
from ..runs.session import Session
from ..sizes.dims import axis_of
from ..sizes.variation import Mixing, Tail, Variation
from .batch_questions import asked_of_all_rows, labels_by_answer
from .by_count import asked_how_many
from .mixing import mixing
from .other_answers import answered_otherwise
from .per_call_state import by_call
from .tail import find_tail

__all__ = ["Chosen", "with_answers", "with_rows", "with_rows_of_the_example", "without_rows"]

Chosen = Callable[[Mapping[str, torch.Tensor]], int | None]
"""The number of the form that inputs ask for."""

_OF_INPUTS = Depends.INPUT | Depends.SHAPE


def with_rows_of_the_example(
    session: Session,
    forms: Mapping[bool, Recording],
    given: Mapping[str, torch.Tensor],
    variation: Variation,
    known: Variation | None,
) -> Variation:
    """The variation of the example's forms, by training flag, with what mixes rows and the tail behind it.

    What is ``known`` of another capture of the model is not asked again.
    """
    told = (forms, given, variation.dims, variation.shapes, session.device, session.start)
    found = known.mixing if known else mixing(session.model, *told, takes=variation.takes_rows)
    if not (known or found.always or found.training):
        written = by_call(session.model, forms[True], given, variation, session.device, session.start)
        found = dataclasses.replace(found, by_call=written)
    tail = find_tail(session.model, *told, found, takes=variation.takes_rows)
    return dataclasses.replace(variation, mixing=found, tail=tail)


def with_rows(
    session: Session,
    form: Recording,
    given: Mapping[str, torch.Tensor],
    variation: Variation,
    first: tuple[Recording, Variation],
    example: Mapping[str, torch.Tensor],
    asks_for: Callable[[Recording, Mapping[str, torch.Tensor]], bool],
) -> Variation:
    """The variation of a form beside the ``first``, with what mixes its rows, or tells how many there are.

    And with what it makes of rows that ask for the other one: ``asks_for`` tells whether inputs, such as
    those ``given`` and of the ``example``, ask for a form. Not asked where rows are mixed in the first form:
    then they are refused, or the tail has the batch.
    """
    known = first[1].mixing
    if known.always:
        return variation
    start = functools.partial(session.start, form.training)
    told = (variation.dims, variation.shapes, session.device)
    mode = functools.partial(_without_mode, start)
    found = mixing(session.model, {False: form}, given, *told, mode, takes=variation.takes_rows).always
    counted = asked_how_many(session.model, (form, variation), first, given, session.device, start)
    of_first, of_form = answered_otherwise(
        session.model, (form, variation), first, (given, example), asks_for, session.device, start
    )
    in_training = found if form.training and known.training else ""
    mixed = Mixing(
        "" if in_training else found, in_training, by_count=counted, of_first=of_first, of_form=of_form
    )
    return dataclasses.replace(variation, mixing=mixed)


def with_answers(
    session: Session,
    forms: Sequence[Recording],
    chosen: Chosen,
    given: Mapping[str, torch.Tensor],
    variation: Variation,
    tail: Collection[str],
    training: bool,
) -> Variation:
    """The variation with a mixing where rows are others once each answers what is asked of all, in a mode.

    Where only the labels that count are others, it is one to look at with each batch.
    """
    start = functools.partial(session.start, training)
    told = (given, variation.dims, variation.shapes, session.device, start)
    found = asked_of_all_rows(session.model, forms, chosen, *told, tail)
    if not found:
        counted = labels_by_answer(session.model, forms, tail)
        mixed = dataclasses.replace(variation.mixing, by_answer=counted)
        return dataclasses.replace(variation, mixing=mixed) if counted else variation
    mixed = dataclasses.replace(variation.mixing, always=found)
    return dataclasses.replace(
        variation, mixing=mixed, tail=Tail(obstacle="each microbatch answers for itself")
    )


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


def _without_mode(start: Callable[[], None], training: bool) -> None:
    start()
