"""``capture``: from a model and example arguments to graphs that do what the model does.

The parts are left to the other modules of this room, what comes of them to ``captured``; cutting the graphs
into stages to ``stages``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import CaptureError, InputError, ModelError
from ..graph import Dim
from .calls.faults import faults_told
from .calls.labels import several_counts
from .captured import Capture
from .code.leaf_state import read_anew, tell_left
from .code.leaves import Policy
from .code.restart import HoldNumbers
from .forms import CaptureForms
from .graphs import opgraph
from .inputs.arguments import Inputs, arguments
from .inputs.caches import switched_off, without_cache
from .inputs.examples import infer
from .inputs.held_numbers import as_floats, counted, divided, owner_of
from .inputs.structure import flatten, unflatten
from .inputs.writes import check_written, given_twice, said_of
from .members import buffers_in, modules_in, parameters_in
from .new_forms import NewForms
from .notes import notes_on
from .runs.assumptions import assumptions_of
from .runs.meta_kernels import asked_once
from .runs.session import Session
from .sizes import dims
from .sizes.explore import confirm
from .sizes.harmless import uneven_sizes
from .sizes.smaller_examples import alike_rows, are_free, few_pixels, few_rows, few_tokens
from .sizes.variation import Variation
from .state.example_data import check_untransformed, check_values, device_of, fresh
from .state.garbage import seldom_searched
from .state.global_hooks import unseen
from .state.reach import GENERATORS
from .state.state import Snapshot, preserved, written_in
from .state.tensor_classes import check_answers
from .state.turns import in_turn
from .state.whole_layers import WholeLayers
from .validation import validated_forms, with_more_sizes_free

__all__ = ["capture"]

_logger = logging.getLogger("autopipe")


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    open: Iterable[str] = (),
    closed: Iterable[str] = (),
    dynamic: Literal["auto"] | bool = "auto",
) -> Capture:
    """Record ``model`` by running it on example arguments, once in training and once in evaluation mode.

    Parameters
    ----------
    args, kwargs: what the model is called with; inferred where the model tells (see ``examples``).
    open, closed: dotted paths of modules to record the inside of, or to keep whole.
    dynamic: ``"auto"`` lets every input size vary that the model lets vary; False fixes them all.

    Raises :class:`ModelError` when the model itself fails on the arguments, :class:`CaptureError` when it
    cannot be recorded, :class:`InputError` for arguments or paths that do not fit. The model is left as it
    was in every case.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is {type(model).__name__}; capture takes a torch.nn.Module")
    if not args and not kwargs:
        args, kwargs = infer(model)
    check_answers(model, args, kwargs)
    check_values(model, args, kwargs)
    policy = Policy(model, pinned=frozenset(closed)).with_opened(open)
    twice = given_twice(arguments(model, tuple(args), dict(kwargs or {})))
    leaves, spec = flatten((tuple(args), dict(kwargs or {})))
    args, kwargs = unflatten(spec, leaves)  # calls may write into the caller's containers
    try:
        found = _capture(_Asked(model, args, kwargs or {}, policy, dynamic))
    except ModelError as error:
        if not twice:
            raise
        raise InputError(f"{error}; {said_of(twice)}") from error
    check_written(model, twice, found.outputs.values())
    tell_left(model, found.left)
    return found


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Kin:
    """What a capture is beside: the first one, what records as that was recorded, and the forms there are."""

    first: Capture
    records: NewForms
    forms: Sequence[CaptureForms]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """What is to be captured: a model called with arguments, which modules stay whole, whether sizes vary.

    ``known`` are the sizes that vary, where an earlier capture has found them; ``kin`` is what it is to be
    beside. ``records`` takes the model apart as it was for an earlier capture, where that is to be found so.
    The arguments are of a batch of ``n_rows`` rows where they have fewer themselves.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    policy: Policy
    dynamic: Any
    kin: _Kin | None = None
    known: Variation | None = None
    records: NewForms | None = None
    n_rows: int = 0


@faults_told()
@in_turn()
@seldom_searched()
def _capture(asked: _Asked, at: Mapping[Dim, int] | None = None) -> Capture:
    """A capture on the example; what calls count in attributes is given to each beside its arguments.

    ``at`` are sizes that an earlier capture was recorded at.
    """
    check_untransformed(type(asked.model).__name__)
    refusal: CaptureError | None = None
    while True:
        try:
            return _on_few_rows(asked, at)
        except HoldNumbers as found:
            owners = {owner_of(name)[0] for name in found.numbers}
            policy = asked.policy
            policy = policy.with_opened(path for path in owners if path and policy.is_inside_leaf(path))
            kwargs = counted(asked.kwargs, found.numbers)
            asked = dataclasses.replace(asked, kwargs=kwargs, policy=policy)
        except CaptureError as error:
            if refusal is None and (others := as_floats(asked.kwargs)) is not None:
                asked, refusal = dataclasses.replace(asked, kwargs=others), error
            else:
                raise refusal or error from None


def _on_few_rows(asked: _Asked, at: Mapping[Dim, int] | None) -> Capture:
    """A capture on few rows and positions of the example, which is fast and, unlike one row, hides nothing.

    On all of them where the model runs on few, or is captured there, only in a way that does not fit them.
    """
    model, args = asked.model, asked.args
    asked = dataclasses.replace(asked, kwargs=(kwargs := without_cache(model, asked.kwargs)))
    if not asked.dynamic:
        return _captured(asked)
    inputs, tensors = Inputs.of(model, args, kwargs)
    device = device_of(model, args, kwargs)
    rows, few = few_rows(inputs, device), few_tokens(inputs, device) or few_pixels(inputs, device)
    if at:
        with contextlib.suppress(CaptureError, ModelError, InputError):
            if (found := _captured_at(at, asked, tensors)) is not None:
                return found
    for cut in filter(None, (rows | few, rows) if few else (rows,)):
        is_short = len(cut) > len(rows)
        confirm_at = dims.resize(tensors, rows) if is_short else None
        with contextlib.suppress(CaptureError, ModelError, InputError):
            found = _captured_at(cut, asked, confirm_at)
            if found is not None and not (is_short and _has_several_means(found)):
                return found if asked.known else _elsewhere(found, cut, asked.kin)
    found = _captured(asked)
    return found if asked.known else _elsewhere(found, {}, asked.kin)


def _has_several_means(found: Capture) -> bool:
    """Whether a loss is made of means over labels which positions that are left out may count unlike."""
    return not found.variation.tail.ops and bool(several_counts(found.model, found.graphs[True].nodes))


def _again(found: Capture, policy: Policy, *, asks_anew: bool = False) -> Capture:
    kin = None if found.first is None else _kin_of(found.first, found)
    known, at = None if asks_anew else found.variation, found.at
    records = None if asks_anew or policy != found.policy else found.new_forms
    return _capture(_Asked(found.model, *found.recorded_with, policy, found.dynamic, kin, known, records), at)


def _kin_of(first: Capture, known: Capture | None = None) -> _Kin:
    """What a capture is beside that is yet to be made, or was where it is ``known``."""
    if first.new_forms is None:
        raise CaptureError("a copy of a capture records the model on no other arguments")
    forms = first.new_forms.made.kin
    own = None if known is None or known.new_forms is None else known.new_forms.made
    return _Kin(first, first.new_forms, forms[: len(forms) if own is None else forms.index(own)])


def _beside(first: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture:
    model = first.model
    check_values(model, args, kwargs)
    leaves, spec = flatten((args, kwargs))
    args, kwargs = unflatten(spec, leaves)  # calls may write into the caller's containers
    found = _capture(_Asked(model, args, kwargs, first.policy, first.dynamic, _kin_of(first)))
    check_written(model, given_twice(arguments(model, args, kwargs)), found.outputs.values())
    return found


def _captured_at(
    cut: Mapping[Dim, int],
    asked: _Asked,
    confirm_at: Mapping[str, torch.Tensor] | None,
    below: int | None = None,
) -> Capture | None:
    """A capture on the example at other sizes; None where it does not fit the example itself."""
    model, args, kwargs = asked.model, asked.args, asked.kwargs
    inputs, tensors = Inputs.of(model, args, kwargs)
    given = inputs.rebuild(model, dims.resize(tensors, cut, skipped=alike_rows(tensors, cut)))
    n_rows = max((d.example for d in cut if d.name == "batch"), default=0)
    few = dataclasses.replace(asked, args=given[0], kwargs=given[1], n_rows=n_rows)
    found = _captured(few, confirm_at, below)
    if not are_free({place for d in cut for place in d.where}, found.ops.dims):
        return None
    found = found.with_example(args, kwargs, tuple(cut))
    values = found.inputs.bind(model, *found.arguments(args, kwargs))
    return found if found.form_of(values) == 0 else None


def _elsewhere(found: Capture, cut: Mapping[Dim, int], kin: _Kin | None) -> Capture:
    """The same recorded where a size is no multiple, if that is right for more sizes: padding is recorded."""
    uneven = () if found.device.type == "meta" else uneven_sizes(found.variation)
    if not uneven:
        return found
    args, kwargs = found.recorded_with
    tensors = Inputs.of(found.model, args, kwargs)[1]
    asked = _Asked(found.model, args, kwargs, found.policy, found.dynamic, kin)
    n_checks = len(found.variation.checks)
    for dim, size in uneven:
        at = {**cut, next(d for d in found.ops.dims if d.name == dim.name): size}
        with contextlib.suppress(CaptureError, ModelError, InputError):
            other = _captured_at(at, asked, tensors, below=n_checks)
            if other is not None and len(other.variation.checks) < n_checks:
                return dataclasses.replace(other, at=at)
    return found


def _check_no_generators(inputs: Inputs) -> None:
    """Raise :class:`InputError` for random generators among the arguments: calls go on from one another."""
    for i, value in inputs.constants.items():
        if isinstance(value, GENERATORS):
            raise InputError(
                f"{inputs.model}: argument {inputs.shown[i]} is a random generator, from which the calls of "
                "all microbatches would draw in turn; let the model hold it, or pass what is drawn from it"
            )


def _captured(
    asked: _Asked, confirm_at: Mapping[str, torch.Tensor] | None = None, below: int | None = None
) -> Capture:
    """A capture on the example; where ``confirm_at`` is given, its shapes are held against a run on it.

    One that no fewer than ``below`` checks limit to some sizes is given up, and one beside kin that does not
    fit a plan for the first of those.
    """
    model, policy = asked.model, asked.policy
    _check_parts(model)

    @functools.cache
    def is_open(path: str) -> bool:
        return not policy.is_inside_leaf(path)

    with (
        torch.inference_mode(False),
        asked_once(device_of(model, asked.args, asked.kwargs)),
        switched_off(model),
        unseen(),
        preserved(model, is_open, holds_back=True) as snapshot,
    ):
        read_anew({type(m) for _, m in modules_in(model)})
        session, made = _recorded(asked, snapshot, is_open, below)
        if confirm_at is not None:
            if session.refused is not None:
                raise session.refused  # on all of the example it may train
            session.start(training=False)
            confirm(model, made.forms[False][0], made.variation, confirm_at, session.device)
    if session.refused is not None:
        _logger.warning("%s; its training form is taken to be its evaluation form", session.refused)
    return _finished(asked, session, made, snapshot)


def _check_parts(model: nn.Module) -> None:
    """Raise :class:`InputError` for a model with parts that no stage can have."""
    lazy = [n for n, t in (*parameters_in(model), *buffers_in(model)) if is_lazy(t)]
    if lazy:
        raise InputError(
            f"{type(model).__name__} has layers that take their sizes from the first data "
            f"({', '.join(lazy[:3])}); run it once on an example before it is captured"
        )
    if any("_device" in held for held in (model._parameters, model._buffers, model._modules)):
        raise InputError(
            f"{type(model).__name__} has a part called _device, where a stage has its device; name it "
            "otherwise, or capture a module that holds the model"
        )


def _recorded(
    asked: _Asked, snapshot: Snapshot, is_open: Callable[[str], bool], below: int | None
) -> tuple[Session, CaptureForms]:
    """The forms of what is asked for, beside those of its kin, and what has recorded them."""
    kin, told = asked.kin, (asked.dynamic, asked.known, below)
    records = asked.records if kin is None else kin.records
    if records is None:
        session = Session(
            asked.model,
            asked.args,
            asked.kwargs,
            asked.policy,
            snapshot,
            sizes_vary=bool(asked.dynamic),
            n_rows=asked.n_rows,
        )
    else:
        session = records.session(asked.args, asked.kwargs, snapshot, asked.n_rows)
    if kin is None:
        session.attempt.obstacles = []  # those of what it was taken apart by are met no more
    taken = () if kin is None else kin.records.names_of_calls
    own_args, own_kwargs = fresh((session.args, session.kwargs), session.device)
    inputs, tensors = Inputs.of(asked.model, own_args, own_kwargs, taken)
    _check_no_generators(inputs)
    if kin is None:
        made = validated_forms(session, inputs, tensors, *told)
        return with_more_sizes_free(session, made, is_open)
    made = validated_forms(session, inputs, tensors, *told, kin.forms)
    kin.records.check_beside(session, made)
    return session, made


def _finished(asked: _Asked, session: Session, made: CaptureForms, snapshot: Snapshot) -> Capture:
    """The capture that forms make, of a model that is as it was."""
    model, kin = asked.model, asked.kin
    inputs = dataclasses.replace(made.inputs, is_apart=session.runs.is_apart)
    graphs = made.graphs()
    shapes = made.shapes
    ops = opgraph.build(
        model,
        made.calls,
        made.forms,
        lambda c, i, t: shapes[id(c)][i] if id(c) in shapes else tuple(t.shape),
        made.variation.dims,
        made.kind,
        made.tail,
    )
    held = assumptions_of(
        model,
        made.forms,
        made.constants,
        made.dtypes,
        made.flags,
        snapshot.reached,
        sorted(session.code.tables_by_row),
        inputs.held,
    )
    args, (own_kwargs, numbers) = session.args, divided(session.kwargs)
    return Capture(
        model=model,
        example=(args, own_kwargs),
        numbers=numbers,
        ops=ops,
        graphs={flag: forms[0].graph for flag, forms in graphs.items()},
        constants=made.constants,
        inputs=inputs,
        outputs={flag: forms[0].output for flag, forms in made.forms.items()},
        device=session.device,
        policy=session.policy,
        variation=made.variation,
        assumptions=held,
        whole=WholeLayers(model, {path for path, _ in held.opened}.__contains__, snapshot.reached),
        again=_again,
        beside=_beside,
        first=None if kin is None else kin.first,
        dynamic=asked.dynamic,
        forms=graphs,
        own={flag: [*range(len(forms))] for flag, forms in graphs.items()},
        questions=made.questions,
        answers=made.answers(),
        notes=(*session.notes, *notes_on(made)),
        left=made.forms[True][0].left,
        written=written_in(model),
        new_forms=NewForms(session, made),
    )
