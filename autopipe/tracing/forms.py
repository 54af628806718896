"""The forms of a capture, made of recordings: equal ones joined, calls under common names, sizes tried.

Recording is left to ``record`` and ``runs``; graphs and the capture itself to ``graphs`` and ``capture``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from ..errors import AutopipeError, CaptureError
from .calls.call import Call, Recording
from .calls.faults import of_models
from .calls.likeness import distinct
from .calls.perform import run_call
from .code.leaves import asking
from .graphs import emit, modes
from .graphs.questions import Question, choose, questions, with_sizes
from .inputs.arguments import Inputs
from .inputs.writes import called
from .rows.analysis import (
    answered_apart,
    with_rows,
    with_rows_of_the_example,
    with_tail_behind,
    without_rows,
)
from .rows.other_answers import FormPairs
from .runs.session import Session
from .sizes.expected import Expected
from .sizes.explore import explore, is_narrowed, taken_against_checks
from .sizes.formulas import by_formula, like_an_input
from .sizes.guards import with_checks
from .sizes.lengths import read_from_inputs
from .sizes.other_masks import witnesses
from .sizes.trials import Explorer
from .sizes.unproven import Proofs, behind_labels, unproven
from .sizes.variation import Fixed, Variation
from .values.tracked import pinned

__all__ = ["CaptureForms", "Form"]

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Form:
    """What the model does for some values of its inputs, as a graph, and the sizes it is right for.

    One that is ``for_sizes`` runs where the sizes of inputs are not right for the first one; ``question`` is
    then what those inputs have to answer as they did when it was recorded. What its graph checks of sizes is
    ``expected``.
    """

    graph: fx.Graph
    variation: Variation
    expected: Expected
    for_sizes: bool = False
    question: Question | int = 0


class CaptureForms:
    """The forms of one capture, by training flag, that of the example first.

    Attributes
    ----------
    forms: recordings whose calls are named. calls: their union in an order that keeps that of each.
    variation: what sizes the first form is right for; ``variations`` that of all, by id of the form.
    questions: by training flag, what tells which form inputs ask for. constants: by name, of all forms.
    shapes: formulas of the calls' shapes by id.
    is_shared: whether one set of recordings serves both modes.
    functions: those of the model's code that ask about sizes, so that others come out differently.
    pairs: what the forms of a mode make of rows that ask for another of them.
    kin: these and those of calls with other arguments of the same capture, the first's first, whose calls and
        constants have names in common; ``everything`` are the recordings of all.
    """

    def __init__(
        self,
        session: Session,
        inputs: Inputs,
        tensors: dict[str, torch.Tensor],
        recorded: Mapping[bool, Sequence[Recording]],
        dynamic: Any,
        known: Variation | None,
        kin: Sequence[CaptureForms] = (),
    ) -> None:
        self.session, self.inputs, self.tensors, self.dynamic = session, inputs, tensors, dynamic
        self.kind = session.kind
        self.proofs = Proofs(session.model, session.kind)
        self.functions: dict[Any, None] = {}
        self.explorers: list[Explorer] = []
        self.pairs = FormPairs(session.code, session.device)
        self._made: dict[int, Form] = {}
        everything = _each(r for records in recorded.values() for r in records)
        self.kin: list[CaptureForms] = [*kin, self]
        self.everything: list[Recording] = [*(kin[0].everything if kin else ()), *everything]
        self.constants = modes.share_constants(self.everything)
        self.calls: list[Call] = []
        self.for_sizes: dict[bool, list[Recording]] = {False: [], True: []}
        unsized = [(r, r.branches) for r in everything]
        for record in everything:
            sized = functools.partial(like_an_input, tensors)
            record.branches = tuple(with_sizes(b, sized) for b in record.branches)
        self.variations: dict[int, Variation] = {}
        self.is_shared = recorded[True] is recorded[False]
        self.questions: dict[bool, Question | int] = {}
        found = {id(records): distinct(records) for records in _each(recorded.values())}
        self.distinct = by_mode = {flag: found[id(records)] for flag, records in recorded.items()}
        for flag, (_, numbers) in by_mode.items():
            self.questions[flag] = questions(recorded[flag], numbers)
        self._first(by_mode[True][0][0], by_mode[False][0][0], known)
        for record, branches in unsized:
            record.branches = tuple(with_sizes(b, self._by_formula) for b in branches)
        for flag in (False, True):
            if flag and self.is_shared:
                self.forms[True] += self.forms[False][1:]
                self.questions[True] = self.questions[False]
                continue
            forms, numbers = by_mode[flag]
            kept = self._others(flag, forms)
            renumbered = {old: new for new, old in enumerate(kept)}
            pairs = [p for p in zip(recorded[flag], numbers, strict=True) if p[1] in renumbered]
            self.questions[flag] = questions([r for r, _ in pairs], [renumbered[n] for _, n in pairs])
        self._ask_rows()

    def join(self) -> None:
        """Be one of the kin, which know of it from now on."""
        first = self.kin[0]
        first.everything += self.everything[len(first.everything) :]
        first.kin.append(self)
        self.everything, self.kin = first.everything, first.kin

    @property
    def named(self) -> list[Call]:
        """The calls that others may be: those that are planned, and its own."""
        sized = (form.calls for forms in self.for_sizes.values() for form in forms)
        return functools.reduce(modes.union, [self.calls, *sized], self.kin[0].calls)

    @property
    def taken(self) -> frozenset[str]:
        """The names of all calls of the kin."""
        forms = (f for made in self.kin for fs in made.for_sizes.values() for f in fs)
        calls = [*(made.calls for made in self.kin), *(form.calls for form in forms)]
        return frozenset(c.name for each in calls for c in each)

    @property
    def dtypes(self) -> bool:
        """Whether the model's own code asked for what autocast has a say in."""
        return any(form.dtypes for form in self.all_forms)

    @property
    def flags(self) -> dict[str, tuple[Callable[[], Any], Any]]:
        """What the model's own code asked of torch and of the process."""
        return {k: v for form in self.all_forms for k, v in form.flags.items()}

    @property
    def asks(self) -> bool:
        """Whether values of the inputs, or where gradients are asked for, tell which form runs."""
        return any(isinstance(q, Question) for q in self.questions.values())

    @property
    def all_forms(self) -> list[Recording]:
        """The forms in either mode, those for other sizes too."""
        return [f for forms in (self.forms, self.for_sizes) for flag in forms for f in forms[flag]]

    @property
    def variation(self) -> Variation:
        return self.variations[id(self.forms[False][0])]

    @property
    def tail(self) -> tuple[str, ...]:
        """Names of the ops that are right on the whole batch alone, whatever the form, and of what only they
        need to be right there."""
        tail = self.variation.tail
        names = {*tail.ops}
        for form in () if not names else (form for forms in self.forms.values() for form in forms):
            for call in form.calls:
                if call.op != "output" and any(c.name in names for c in call.inputs):
                    names.add(call.name)
            if names:
                held = dataclasses.replace(self.variation, shapes=self.variations[id(form)].shapes)
                names |= without_rows(form, names, held)
        return tuple(c.name for c in self.calls if c.name in names or c.name in tail.again)

    @property
    def shapes(self) -> dict[int, Any]:
        return {k: v for variation in self.variations.values() for k, v in variation.shapes.items()}

    @property
    def settling(self) -> dict[Any, None]:
        """The functions of the model's code that settle on a size where they could stay whole."""
        guards = (g for form in self.firsts for g in form.guards if g.function is pinned)
        return {g.inside: None for g in guards if g.inside is not None}

    @functools.cached_property
    def is_narrowed(self) -> bool:
        """Whether the model itself takes sizes of inputs that the first form does not."""
        return bool(self.explorers) and is_narrowed(self.explorers[0], self.variation)

    @property
    def _has_ways_by_size(self) -> bool:
        """Whether the model takes sizes at which what its code asks of them comes out otherwise."""
        ways = taken_against_checks(self.explorers[-1], [self.variation]) if self.explorers else iter(())
        return next(ways, None) is not None

    def graphs(self) -> dict[bool, tuple[Form, ...]]:
        """Every form as a graph; one object where one serves both modes."""
        sized = {id(form) for forms in self.for_sizes.values() for form in forms}
        made = {id(form): self.graph(form, for_sizes=id(form) in sized) for form in _each(self.all_forms)}
        return {
            flag: tuple(made[id(form)] for form in (*forms, *self.for_sizes[flag]))
            for flag, forms in self.forms.items()
        }

    def graph(self, form: Recording, *, for_sizes: bool = True) -> Form:
        """One form as a graph."""
        question = questions([form], [0]) if for_sizes else 0
        variation = self.variations[id(form)]
        harmless = frozenset[int]().union(*(e.harmless for e in self.explorers))
        expected = Expected(form, variation.dims, harmless)
        made = Form(emit.graph(form), variation, expected, for_sizes, question)
        return self._made.setdefault(id(form), made)

    def answers(self) -> dict[tuple[Form, Form], str]:
        """Of two forms, what is asked where the second makes other rows of those that ask for the first."""
        return {(self._made[j], self._made[k]): said for (j, k), said in self.pairs.said.items() if said}

    def _first(self, train: Recording, evaluation: Recording, known: Variation | None) -> None:
        """The form of the example in both modes, one object where one serves both."""
        taken = self.taken
        merged = modes.merge(train, evaluation, self.named, taken)
        self.firsts = firsts = _each(merged.values())
        variation = self._vary(firsts, self.tensors, self._asking(firsts[-1].training, 0), known)
        if self.dynamic:
            variation = with_rows_of_the_example(self.session, merged, self.tensors, variation, known)
        variation = self._with_labels(firsts, variation)
        taken |= {c.name for form in firsts for c in form.calls}
        checked: dict[int, Recording] = {}
        for form in firsts:
            read_from_inputs(self.session.model, form, variation.dims, variation.shapes, self.proofs)
            checked[id(form)] = with_checks(form, self._unsure(form, variation), taken)
            taken |= {c.name for c in checked[id(form)].calls}
        self.forms = {flag: [checked[id(form)]] for flag, form in merged.items()}
        self.calls = list(self.forms[True][0].calls)
        if self.forms[False][0] is not self.forms[True][0]:
            self.calls = modes.union(self.calls, self.forms[False][0].calls)
        for flag, forms in self.forms.items():
            self.variations[id(forms[0])] = variation
            is_asked = functools.partial(self._asks_for, flag, 0)
            self.pairs.know(forms[0], variation, self.tensors, is_asked, most=2)

    def _unsure(self, form: Recording, variation: Variation) -> frozenset[int]:
        """Ids of the guards that the graph itself must check."""
        return variation.unsure | unproven(self.session.model, form, self.proofs)

    def _with_rows(
        self, form: Recording, given: Mapping[str, torch.Tensor], variation: Variation, *, is_shared: bool
    ) -> Variation:
        """The variation of a form beside the first, with what is to be known of its rows and labels."""
        if self.dynamic:
            first = self.variations[id(self.forms[form.training][0])]
            variation = with_rows(self.session, form, given, variation, first, is_shared=is_shared)
        return self._with_labels([form], variation)

    def _with_labels(self, forms: Sequence[Recording], variation: Variation) -> Variation:
        """The variation of forms with the sizes that their losses count labels with, where they are alike."""
        each = [behind_labels(self.session.model, f, variation.shapes, self.proofs) for f in forms]
        found = {name: size for sizes in each for name, size in sizes.items()}
        alike = {n: s for n, s in found.items() if all(sizes.get(n, s) == s for sizes in each)}
        return dataclasses.replace(variation, behind_labels=alike)

    def _ask_rows(self) -> None:
        """Compare the forms of each mode in pairs, and tell what two rows answer so that they are others.

        What follows from that may be right on the whole batch: then it is not looked at in rows. Not so where
        the model takes sizes that need forms of their own, which none has that has a tail.
        """
        before = self.variation
        found = self._answered_apart(before)
        if found is not before and not self.is_narrowed and not self._has_ways_by_size:
            other = dataclasses.replace(before, mixing=found.mixing)
            late = with_tail_behind(self.session, self.forms, self.tensors, other)
            if late.tail.ops:
                self._take_first(late)
                self.pairs.said.clear()
                if self._answered_apart(late) is late:
                    self._mix_in_tail()
                    return
        if found is not before:
            self._take_first(found)

    def _mix_in_tail(self) -> None:
        """What mixes rows in further forms is in the tail: ahead of it they have the calls of the first."""
        for form in (form for forms in self.forms.values() for form in forms[1:]):
            known = self.variations[id(form)]
            mixing = dataclasses.replace(known.mixing, always="", training="", untold="", unasked=())
            self.variations[id(form)] = dataclasses.replace(known, mixing=mixing)

    def _take_first(self, variation: Variation) -> None:
        self.variations.update((id(forms[0]), variation) for forms in self.forms.values())

    def _answered_apart(self, variation: Variation) -> Variation:
        """See :func:`answered_apart`; of the forms of each mode."""
        tail, device = self.tail, self.session.device
        if not self.dynamic or (variation.mixing.always and not tail):
            return variation
        for flag in (False, True):
            if flag and self.is_shared:
                break
            forms = self.forms[flag]
            for number, form in enumerate(forms):
                self.pairs.look(form, forms[:number], tail, self.session.start, flag)
            if not variation.takes_rows(2) or (flag and variation.mixing.training):
                continue  # rows are others in training whatever they answer
            chosen = functools.partial(self._chosen, self.questions[flag], forms[0])
            asked = answered_apart(self.pairs, forms, chosen, self.tensors, variation, tail, device)
            if asked is not variation:
                return asked
        return variation

    def _others(self, flag: bool, forms: Sequence[Recording]) -> list[int]:
        """Make the other forms of a mode; those that turn out not to be the model are left out.

        Returns the numbers of those there are, the first among them.
        """
        kept = [0]
        for number, form in enumerate(forms[1:], 1):
            if form.output != self.forms[flag][0].output:
                continue
            taken = self.taken
            modes.name_like(self.named, form, taken)
            given = self._witness(flag, number) if self.dynamic else None  # else nothing is run on it
            try:
                asked = self._asking(flag, number) if given else _never
                variation = self._vary([form], given or self.tensors, asked, self.variation)
            except AutopipeError:
                continue
            variation = self._with_rows(form, given or self.tensors, variation, is_shared=self.is_shared)
            read_from_inputs(self.session.model, form, variation.dims, variation.shapes, self.proofs)
            checked = with_checks(form, self._unsure(form, variation), taken)
            self.forms[flag].append(checked)
            self.variations[id(checked)] = variation
            is_asked = functools.partial(self._asks_for, flag, number)
            self.pairs.know(checked, variation, given or self.tensors, is_asked, most=2)
            self.calls = modes.union(self.calls, checked.calls)
            kept.append(number)
        return kept

    def at_sizes(
        self,
        form: Recording,
        inputs: Inputs,
        tensors: Mapping[str, torch.Tensor],
        beside: Sequence[Recording],
        *,
        is_shared: bool,
    ) -> Recording:
        """The form that a recording at other sizes is: its calls named as those there are, its sizes found.

        ``beside`` are forms that are to be added with it; one that ``is_shared`` serves both modes.

        Raises :class:`CaptureError` where other inputs may vary than in the form of the example.
        """
        named = functools.reduce(modes.union, (other.calls for other in beside), self.named)
        taken = self.taken
        modes.name_like(named, form, taken)
        shapes = {n: tuple(t.shape) for n, t in tensors.items()}
        dims = tuple(
            dataclasses.replace(d, example=shapes[d.where[0][0]][d.where[0][1]]) for d in self.variation.dims
        )
        fixed = {(n, a): Fixed(shapes[n][a], held.reason) for (n, a), held in self.variation.fixed.items()}
        known = dataclasses.replace(self.variation, dims=dims, fixed=fixed)
        branches = form.branches
        form.branches = tuple(with_sizes(b, functools.partial(like_an_input, tensors)) for b in branches)
        asked = functools.partial(self.is_answered, form) if branches else None
        variation = self._vary([form], tensors, asked, known, inputs)
        if {d.where for d in variation.dims} != {d.where for d in dims}:
            raise CaptureError("other sizes may vary there")
        variation = self._with_rows(form, tensors, variation, is_shared=is_shared)
        taken |= {c.name for c in (*named, *form.calls)}
        checked = with_checks(form, self._unsure(form, variation), taken)
        self.variations[id(checked)] = variation
        self.pairs.know(checked, variation, tensors, functools.partial(self.is_answered, form), most=1)
        checked.branches = tuple(with_sizes(b, self._by_formula) for b in branches)
        return checked

    def add(self, flag: bool, form: Recording) -> None:
        """Take a form for sizes of inputs that no other is right for."""
        variation = self.variations[id(form)]
        read_from_inputs(self.session.model, form, variation.dims, variation.shapes, self.proofs)
        beside = [*self.forms[flag], *self.for_sizes[flag]]
        self.for_sizes[flag].append(form)
        if self.dynamic and not self.variation.mixing.always:
            self.pairs.look(form, beside, self.tail, self.session.start, flag)

    def shared(self, records: Sequence[Recording]) -> None:
        """Give the constants of further recordings, and of those there are, names in common."""
        self.everything += records
        self.constants = modes.share_constants(self.everything)

    def _by_formula(self, call: Call) -> Call:
        """A size as its formula in the sizes of inputs says."""
        kept = (c for forms in self.forms.values() for form in forms for c in form.calls)
        return by_formula(self.tensors, self.variation.dims, self.shapes, kept, call)

    def _witness(self, flag: bool, number: int) -> dict[str, torch.Tensor] | None:
        """Inputs of the example's sizes that ask for the form with this number, where some are found."""
        if self.session.device.type == "meta":
            return None
        form = self.distinct[flag][0][number]
        known = [form.given] if form.given else [self.tensors, *witnesses(self.tensors)]
        choices = (form.setting.apply(g) for g in known)
        return next((g for g in choices if self._asks_for(flag, number, g)), None)

    def is_of_the_example(self, flag: bool, given: Mapping[str, torch.Tensor]) -> bool:
        """Whether inputs ask for the form that the example takes in a mode."""
        return isinstance(self.questions[flag], int) or self._asks_for(flag, 0, given)

    def is_answered(self, form: Recording, given: Mapping[str, torch.Tensor]) -> bool:
        """Whether inputs answer what the model asks of them as they did in this recording."""
        return self._is_chosen(questions([form], [0]), 0, form, given)

    def _asks_for(self, flag: bool, number: int, given: Mapping[str, torch.Tensor]) -> bool:
        return self._is_chosen(self.questions[flag], number, self.distinct[flag][0][number], given)

    def _asking(self, flag: bool, number: int) -> Callable[[Mapping[str, torch.Tensor]], bool] | None:
        """Tells whether inputs ask for the form with this number; None where all do."""
        is_asked = isinstance(self.questions[flag], Question)
        return functools.partial(self._asks_for, flag, number) if is_asked else None

    def _is_chosen(
        self, question: Question | int, number: int, form: Recording, given: Mapping[str, torch.Tensor]
    ) -> bool:
        return self._chosen(question, form, given) == number

    def _chosen(
        self, question: Question | int, form: Recording, given: Mapping[str, torch.Tensor]
    ) -> int | None:
        """The number of the form that inputs ask for in the setting of this one, if any does."""

        def run(call: Call, args: Any, kwargs: Any) -> Any:
            return run_call(
                self.session.model, self.constants, call, args, kwargs, given, self.session.device
            )

        try:
            with torch.set_grad_enabled(form.setting.grad):
                return choose(question, run)
        except of_models():  # most likely inputs of sizes that the question is not for, which a call refuses
            return None

    def _vary(
        self,
        forms: Sequence[Recording],
        tensors: Mapping[str, torch.Tensor],
        is_asked_for: Callable[[Mapping[str, torch.Tensor]], bool] | None,
        known: Variation | None,
        inputs: Inputs | None = None,
    ) -> Variation:
        """For what sizes forms are right; where others are asked for, nothing is compared with the model."""
        if not self.dynamic:
            places = ((n, a, size) for n, t in tensors.items() for a, size in enumerate(t.shape))
            return Variation(fixed={(n, a): Fixed(size, "dynamic=False") for n, a, size in places})
        session = self.session
        inputs = inputs or self.inputs

        def call(given: Mapping[str, torch.Tensor]) -> Any:
            with asking():
                return called(session.model, *inputs.rebuild(session.model, given))

        explorer = Explorer(
            session.model,
            forms,
            inputs,
            call,
            tensors,
            session.device,
            session.start,
            self.kind,
            is_asked_for,
        )
        self.explorers.append(explorer)
        explorer.is_of_a_kind, explorer.n_rows = inputs is not self.inputs, session.n_rows
        is_first = any(f is forms[0] for f in self.firsts)
        explorer.by_mode = len(forms) > 1 or not (is_first or self.is_shared)
        try:
            return explore(explorer, known)
        finally:
            self.functions.update(explorer.functions)


def _each(things: Iterable[_T]) -> list[_T]:
    """Those that are one object once, in order."""
    return list({id(thing): thing for thing in things}.values())


def _never(given: Mapping[str, torch.Tensor]) -> bool:
    return False
