"""Whether a model treats the rows of a batch one by one, as cutting it into microbatches takes for granted.

Comparing the pipeline with the model on a whole batch is left to ``stages.verify``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...errors import AutopipeError, InputError
from ...graph import Op, OpGraph, batch_dim
from ...stages import Stage, relative_error, run_values
from ...tracing.calls.labels import DEFAULTS, MODULES
from ...tracing.members import submodule
from ...tracing.rows.tail import join, row_axes, taken_amiss
from ...tracing.sizes.variation import Mixing, Tail, said_nearly
from ...tracing.state.whole_layers import MODE_OF
from .microbatch import Batch, Splitter, with_forms
from .outputs import Outputs
from .weights import Weigher

if TYPE_CHECKING:
    from ...tracing import Capture

__all__ = ["MixedRows", "mixing"]

_logger = logging.getLogger("autopipe")
_N_SETTLING = 3
"""After how many calls what has changed in layers is taken for what calls do there, as counters do."""

ALLOWED = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Relative; products of other sizes round otherwise."""
ALLOWED_BELOW = 0.1


class MixedRows:
    """What the capture found that makes rows depend on one another, told when it comes to matter."""

    def __init__(self, capture: Capture, mode: str, is_whole: bool) -> None:
        """``is_whole``: what mixes rows at the model's end gets the whole batch."""
        self._capture, self._model, self._variation = capture, capture.model, capture.variation
        self._mode, self._is_whole = mode, is_whole
        self._told = set[str]()
        self._mixing, self._tail = self._variation.mixing, self._variation.tail
        self._by_mode, self._n_checked, self._is_checked = "", 0, False
        self._drawn: dict[bool, str] = {}
        self._amiss: dict[tuple[int, int, bool], str] = {}
        self._given: str | None = None
        self._of_more: dict[tuple[bool, int, int], Mixing] = {}

    def check_tables(self) -> None:
        """Raise :class:`InputError` where tables by which rows are taken hold something else than before."""
        if self._mode != "allow" and (told := ", ".join(self._capture.assumptions.rewritten())):
            raise InputError(
                f"{told} changed after the capture, and rows of a batch of {type(self._model).__name__} take "
                "places there by their number, so that they may depend on one another; pass "
                "n_microbatches=1, put it back, or capture again as it is now"
            )

    def check(
        self,
        batch: Batch,
        *,
        has_backward: bool,
        may_ask: bool,
        running: Callable[[], contextlib.AbstractContextManager[None]] | None,
    ) -> None:
        """Raise :class:`InputError` where microbatches would not be what the batch is; warn once of less.

        Less is what is allowed, and what mixes rows in training only, as batch norm does, or in the backward.
        Where layers that stay whole have changed the model is run to ask anew, if it ``may``; else that is
        said. So it is for a batch of more rows than were asked about, ``running`` within what that gives.
        """
        self._n_checked += 1
        self._follow_layers(batch, may_ask=may_ask)
        if self._is_whole:
            self._check_given()
            self._check_taken(batch)
        others = self._others(batch, running)
        name, (always, less) = type(self._model).__name__, self._mixed_in(batch, others, has_backward)
        if always and self._mode != "allow":
            raise InputError(
                f"rows of a batch of {name} depend on one another ({always}{self._why_not_apart()}), so its "
                "microbatches do not give what the batch gives; pass n_microbatches=1, or have only the "
                "model's end compare rows, as its loss, which then runs on the whole batch; "
                "runtime(batch_dims={'name': axis}) where the batch lies along another axis; "
                "mixed_rows='allow' to take each microbatch for a batch"
            )
        self._tell_mixed(name, always or less)
        self._tell_nearly(name, others)
        self._tell_drawn(name)
        self._is_checked = True

    def _others(
        self, batch: Batch, running: Callable[[], contextlib.AbstractContextManager[None]] | None
    ) -> list[Mixing]:
        """What mixes rows in the forms of a batch beside the one that most run, and in as many rows."""
        training = self._model.training
        forms, usual = self._capture.forms[training], self._capture.own[training][0]
        others = [forms[number].variation.mixing for number in sorted({*batch.forms} - {usual})]
        return [*others, *self._of_so_many(batch, running)]

    def _mixed_in(self, batch: Batch, others: Sequence[Mixing], has_backward: bool) -> tuple[str, str]:
        """In words, what makes rows of a batch depend on one another, and what less does; or nothing."""
        found, tail, training = self._mixing, self._tail, self._model.training
        in_mode, always = _in_mode(found, training), found.always
        if self._is_whole:
            in_mode, always = tail.before if training else "", ""
        elif {op.name for op in self._capture.ops.compute} <= {*tail.ops}:
            always = always or (in_mode if training else "")  # nothing is left for microbatches
        limits = () if self._is_whole else (m.beyond for m in (found, *others) if m.beyond)
        always = always or _first(m.always for m in others)
        always = always or self._capture.answered_otherwise(batch.forms, batch.of_all)
        always = always or _first(
            f"{what}, on more than {n} rows" for n, what in limits if sum(batch.rows) > n
        )
        in_mode = in_mode or _first(m.training for m in others if training)
        if in_mode:
            return always, f"in {'training' if training else 'evaluation'}: {in_mode}"
        return always, _first(m.backward for m in (found, *others) if has_backward) or self._by_mode

    def _why_not_apart(self) -> str:
        """Why what mixes rows does not run once on the whole batch, where that was asked for."""
        if self._mode != "tail" or self._is_whole:
            return ""
        planned = "its plan cuts what follows: plan for several microbatches" if self._tail.ops else ""
        why = self._tail.obstacle or planned
        return why and f"; {why}"

    def _tell_mixed(self, name: str, mixed: str) -> None:
        """Warn of what makes rows depend on one another, or else of what calls leave, or was not told."""
        found, training = self._mixing, self._model.training
        changed = found.by_call if training else found.evaluation.by_call
        if mixed:
            self._tell(
                f"rows of a batch of {name} depend on one another ({mixed}): each microbatch is a batch of "
                "its own there, as with gradient accumulation; n_microbatches=1 takes the batch whole"
            )
        elif said := found.said_by_call if training else found.said_in_evaluation:
            self._tell(f"{name}: {said}", changed)
        elif found.said_untold:
            self._tell(f"{name}: {found.said_untold}")

    def _tell_nearly(self, name: str, others: Sequence[Mixing]) -> None:
        """Warn of what makes rows depend on one another no more than solvers that adapt to them do."""
        own = self._tail.nearly if self._is_whole else self._mixing.nearly
        if nearly := said_nearly(_first(m.nearly for m in others) or own):
            self._tell(f"{name}: {nearly}")

    def _tell(self, what: str, about: Sequence[str] = ()) -> None:
        """Say something once, or once ``about`` each of some names, whatever the mode."""
        if not self._told.issuperset(about or (what,)):
            self._told.update(about or (what,))
            _logger.warning("%s", what)

    def _tell_drawn(self, name: str) -> None:
        """Say once which draws of the model's present mode have no numbers for each row."""
        training, ops = self._model.training, self._capture.ops
        if training in self._drawn:
            return
        asked = (op for op in ops.compute if op.mode in ("both", "train" if training else "eval"))
        inside = self._mixing.shared_draws if training else self._mixing.evaluation.shared_draws
        places = [op.source or op.name for op in asked if _is_drawn_for_all(ops, op, inside)]
        drawn = ", ".join(dict.fromkeys(places[:3]))
        if drawn and drawn not in self._drawn.values():
            _logger.warning(
                "the rows of a batch of %s share what %s draws: each microbatch draws its own, as with "
                "gradient accumulation; n_microbatches=1 draws it once",
                name,
                drawn,
            )
        self._drawn[training] = drawn

    def _check_given(self) -> None:
        """Raise :class:`InputError` where calls of another kind make a number of rows ahead of the tail.

        The plan's tail is that of the first kind, and takes of numbers those of one microbatch.
        """
        if self._given is None:
            self._given = next(self._numbers_given(), "")
        if self._given:
            raise InputError(
                f"{self._given} makes a number of all rows, in a call unlike the one that "
                f"{type(self._model).__name__} was planned for, of which other ops have the whole batch; "
                "pass n_microbatches=1, or capture with such a call and plan for it"
            )

    def _numbers_given(self) -> Iterator[str]:
        """The ops ahead of the tail that make a number of a call's rows and give it out, by place."""
        first, ops = self._capture.kinds[0], self._capture.ops
        if self._capture is first:
            return
        given = (
            a for a, takers in ops.consumers.items() if any(ops.by_name[b].kind == "output" for b in takers)
        )
        for op in (ops.by_name[name] for name in given if name not in first.ops.tail):
            if op.is_tainted and op.outputs and all(axis is None for axis in row_axes(ops, op.name)):
                yield op.source or op.name

    def _check_taken(self, batch: Batch) -> None:
        """Raise :class:`InputError` where microbatches do not make what the form of the whole batch takes."""
        *parts, whole = batch.forms or (0,)
        training = self._model.training
        for number in sorted({*parts} - {whole}):
            at = number, whole, training
            if at not in self._amiss:
                forms = self._capture.forms[training]
                self._amiss[at] = taken_amiss(forms[number].graph, forms[whole].graph, self._tail)
            if name := self._amiss[at]:
                raise InputError(
                    f"{name}, which the end of {type(self._model).__name__} takes of the whole batch, is not "
                    "made in microbatches that go another way by their values, or is something else there; "
                    "pass n_microbatches=1 for such a batch"
                )

    def settle(self) -> None:
        """After a call: what the first few that are checked change in layers is no change of the model.

        Not after one that was not, as of one microbatch: what differs then may have been changed ahead of it.
        """
        if self._is_checked and self._n_checked <= _N_SETTLING:
            self._capture.whole.accept(self._capture.whole.changed())
        self._is_checked = False

    def _follow_layers(self, batch: Batch, *, may_ask: bool) -> None:
        """Ask anew how rows depend on one another where layers that stay whole are not what they were.

        Raises :class:`InputError` where what a plan or the weights of microbatches go by is otherwise now.
        """
        whole, name = self._capture.whole, type(self._model).__name__
        if not (changed := whole.changed()):
            return
        shown = f"{', '.join([*changed][:3])} changed after the capture"
        otherwise = InputError(
            f"{name}: {shown}, and with it how microbatches make what the batch gives; capture again as the "
            "model is now, put it back, or pass n_microbatches=1"
        )
        if any(p and self._weighs(p, n.rpartition(".")[2]) for n, p in changed.items()):
            raise otherwise
        if not may_ask:
            whole.accept(changed)
            _logger.warning(
                "%s: %s; whether rows of a batch depend on one another as before is asked in one process "
                "alone, of stages that nothing wraps; where they may, capture again as the model is now, "
                "or pass n_microbatches=1",
                name,
                shown,
            )
            return
        try:
            now = self._capture.asked_anew()
        except AutopipeError as error:
            whole.accept(changed)
            why = "whether rows of a batch depend on one another as before could not be asked"
            _logger.warning("%s: %s; %s: %s", name, shown, why, str(error))
            return
        self._of_more.clear()
        sums = now.mixing.sums != self._mixing.sums
        is_alone = bool(now.mixing.one_row) and not self._capture.one_row and 1 in batch.rows
        is_cut = self._is_whole and not {*now.tail.ops} <= {*self._tail.ops}
        if is_alone or is_cut or (sums and not now.mixing.always):
            raise otherwise
        if all(n.startswith(MODE_OF) for n in changed):
            # batch norm that trains, as it does in training
            self._by_mode = now.mixing.always or now.mixing.training
            is_other = bool(self._by_mode)
        else:
            is_other = now.mixing != self._mixing
            self._mixing, self._tail = now.mixing, now.tail
        if is_other:
            self._told.clear()
        whole.accept(changed)

    def _of_so_many(
        self, batch: Batch, running: Callable[[], contextlib.AbstractContextManager[None]] | None
    ) -> list[Mixing]:
        """What mixes so many rows as the batch has, where that was not asked before: asked now, once.

        Of a rank that is fed nothing is asked: the one that feeds it has asked.
        """
        n_rows, training = sum(batch.rows), self._model.training
        is_fed = any(isinstance(v, Tensor) and v.is_meta for v in batch.whole.values())
        found, usual = list[Mixing](), self._capture.own[training][0]
        tail = self._tail if self._is_whole else Tail()
        for number in sorted({*batch.forms} or {usual}):
            known = self._capture.forms[training][number].variation.mixing
            unasked = self._mixing.unasked if number == usual else known.unasked
            if self._is_whole:  # ahead of the end, where further forms have the calls of the first
                unasked = (*self._tail.unasked, *(unasked if number != usual else ()))
            while n := max((n for n in unasked if n <= n_rows), default=0):
                key = training, number, n
                if key not in self._of_more and is_fed:
                    break
                if key not in self._of_more:
                    self._of_more[key] = self._asked_of(number, batch, n, tail, running)
                found.append(self._of_more[key])
                unasked = found[-1].unasked
        return found

    def _asked_of(
        self,
        number: int,
        batch: Batch,
        n_rows: int,
        tail: Tail,
        running: Callable[[], contextlib.AbstractContextManager[None]] | None,
    ) -> Mixing:
        why = "the stages were wrapped"
        m = batch.forms.index(number) if batch.forms else batch.n_microbatches
        is_part = m < batch.n_microbatches
        values = {n: column[m] for n, column in batch.leaves.items()} if is_part else batch.whole
        try:
            if running is not None:
                with running():
                    return self._capture.asked_of_more(number, values, n_rows + 1, tail)
        except AutopipeError as error:
            why = str(error)
        self._tell(
            f"whether {n_rows} rows of a batch of {type(self._model).__name__} or more depend on one another "
            f"could not be asked ({why}); where they do, microbatches do not give what the batch gives: "
            "pipe.verify() compares them, capture with an example of so many, or pass n_microbatches=1"
        )
        return Mixing()

    def _weighs(self, path: str, name: str) -> bool:
        """Whether an attribute of a layer is what a mean over labels counts by."""
        return name in DEFAULTS and isinstance(submodule(self._model, path), MODULES)


@torch.enable_grad()
def mixing(
    capture: Capture,
    stages: Sequence[Stage],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    n_microbatches: int,
) -> str:
    """In words, which output of the whole batch the microbatches do not give; empty where they give all.

    In evaluation mode, where batch norm and dropout leave rows alone; with gradients, which a model may take
    itself. Of a model that draws noise there what the capture found is told: microbatches draw other noise
    than the batch.
    """
    with _evaluating(capture.model):
        capture, _ = capture.kind_of(args, dict(kwargs))
        values, form = capture.bound(*capture.arguments(args, dict(kwargs)))
        batch = with_forms(Splitter(capture).split(values, None, n_microbatches), capture)
        outputs, has_tail = Outputs(capture), "tail" in stages[-1].sections
        try:
            if not has_tail:
                outputs.check(batch)
        except InputError as refusal:
            return str(refusal)
        if has_tail:
            joined = _joined_ahead(capture, stages, batch)
        else:
            parts = [
                run_values(stages, {name: column[m] for name, column in batch.leaves.items()}, batch.form(m))
                for m in range(batch.n_microbatches)
            ]
            weights, _ = Weigher(capture, None, None, None).weigh(batch, args, kwargs, values)
            joined = outputs.join(parts, batch, weights)
        if _is_noisy(lambda: run_values(stages, values, form)):
            return capture.variation.mixing.always
        for i, (whole, found) in enumerate(zip(run_values(stages, values, form), joined, strict=True)):
            if not isinstance(whole, Tensor):
                continue
            error = relative_error(whole, found)
            if whole.is_floating_point() and error > ALLOWED.get(whole.dtype, ALLOWED_BELOW):
                return f"output {i} differs by {error:.1e} of its largest value"
    return ""


def _joined_ahead(capture: Capture, stages: Sequence[Stage], batch: Batch) -> Sequence[Any]:
    """The model's output leaves where its tail takes the whole batch, and all before it microbatches."""
    *others, last = stages
    body, tail = last.sections["body"], last.sections["tail"]
    made: list[dict[str, Any]] = []
    for m in range(batch.n_microbatches):
        values = {name: column[m] for name, column in batch.leaves.items()}
        for stage, section in [(s, s.sections[""]) for s in others] + [(last, body)]:
            given = stage(*map(values.get, section.inputs), form=batch.form(m), section=section.name)
            values.update(zip(section.outputs, given, strict=True))
        made.append(values)
    ahead = {*body.outputs, *(n for stage in others for n in stage.outputs)}
    found = ahead & capture.ops.by_name.keys()  # no call makes the values of all kinds
    blocks = capture.variation.tail.blocks
    taken = [
        join([v[n] for v in made], row_axes(capture.ops, n), batch.rows if n in blocks else ())
        if n in found
        else batch.whole.get(n)
        for n in tail.inputs
    ]
    result: Sequence[Any] = last(*taken, form=(batch.forms or (0,))[-1], section=tail.name)
    return result


def _is_noisy(run: Callable[[], Sequence[Any]]) -> bool:
    """Whether running twice gives other tensors."""
    return any(
        isinstance(a, Tensor) and not torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(run(), run(), strict=True)
    )


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _in_mode(found: Mixing, training: bool) -> str:
    """What mixes rows in one mode alone, or is carried from call to call in it; or nothing."""
    if training:
        return found.training or ("" if found.by_call else found.carried)
    return "" if found.evaluation.by_call else found.evaluation.carried


def _first(words: Iterable[str]) -> str:
    return next(filter(None, words), "")


def _is_drawn_for_all(ops: OpGraph, op: Op, inside: Collection[str]) -> bool:
    """Whether a function of torch draws numbers of which none is of a row, or code that stays whole does."""
    if not (op.is_random and op.outputs) or op.name in ops.tail:
        return False
    if op.kind not in ("function", "method") or not op.target.startswith("torch."):
        return op.name in inside
    return batch_dim(ops.dims) is not None and all(axis is None for axis in row_axes(ops, op.name))
