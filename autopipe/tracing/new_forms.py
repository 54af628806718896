"""Records further forms of a captured model, for inputs of later calls, and asks of more rows than it has.

Which form inputs ask for is left to ``captured``, what makes a recording a form to ``forms_by_size``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ..errors import AutopipeError, CaptureError, InputError
from ..graph import batch_dim
from .calls.call import Recording, meta
from .forms import CaptureForms, Form
from .forms_by_size import check_alike, forms_on, why_no_more
from .inputs.arguments import Inputs
from .inputs.caches import switched_off
from .rows.analysis import mixing_of
from .runs.session import Session
from .sizes import dims as sizing
from .sizes.variation import Mixing, Tail
from .state.example_data import all_on, check_untransformed
from .state.garbage import seldom_searched
from .state.global_hooks import unseen
from .state.state import Snapshot, preserved
from .state.turns import in_turn

__all__ = ["NewForms"]

_MOST_FORMS = 64
"""How many forms a model may have in a mode; each takes about as long to record as a capture does."""


class NewForms:
    """The forms of a finished capture, to which others are added.

    Attributes
    ----------
    made: the forms there are; its ``session`` is there while others are recorded.
    """

    def __init__(self, session: Session, made: CaptureForms) -> None:
        self.made, self._model, self._device = made, session.model, session.device
        self._attempt, self._casting = session.attempt, session.runs.casting
        made.tensors = {name: meta(tensor) for name, tensor in made.tensors.items()}
        self._rest()

    @property
    def names_of_calls(self) -> frozenset[str]:
        """What ops are called, which no input may be."""
        return self.made.taken - {str(name) for made in self.made.kin for name in made.inputs.names}

    def session(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], snapshot: Snapshot, n_rows: int = 0
    ) -> Session:
        """What records the model as it was recorded, on other arguments; no further leaf is opened.

        These are of a batch of ``n_rows`` rows where they have fewer themselves.
        """
        attempt, model, sizes_vary = self._attempt, self._model, bool(self.made.dynamic)
        found = Session(model, args, kwargs, attempt.policy, snapshot, sizes_vary=sizes_vary, n_rows=n_rows)
        found.attempt = dataclasses.replace(attempt, tried={*attempt.tried}, divided=[], divides=False)
        found.runs.casting = {*self._casting}
        return found

    def check_beside(self, session: Session, made: CaptureForms) -> None:
        """Raise :class:`CaptureError` for forms of other arguments that do not fit a plan for these.

        ``session`` is what has recorded them.
        """
        if session.policy != self._attempt.policy:
            raise CaptureError("the model is taken apart otherwise with these arguments")
        check_alike(self.made, made.all_forms)
        if made.inputs.numbers:
            _check_recurring(made.all_forms)

    def record(self, inputs: Inputs, values: Mapping[str, torch.Tensor]) -> dict[bool, Form]:
        """A form for inputs like ``values``, by training flag, held against the model on other data too.

        It is recorded on as many rows of them as the others were, or on all where it then is not for them.
        Raises :class:`AutopipeError` where the model cannot be recorded so, or calls for what a plan for the
        other forms has no place for.
        """
        check_untransformed(inputs.model)
        if why := why_no_more(self.made, self._device):
            raise CaptureError(f"{inputs.model} has no forms for other inputs than the example's: {why}")
        n_forms = max(len(forms) + len(self.made.for_sizes[f]) for f, forms in self.made.forms.items())
        if n_forms >= _MOST_FORMS:
            raise InputError(
                f"{inputs.model} behaves differently on each of {n_forms} kinds of inputs so far; pad "
                "batches to a few lengths, or keep the code that asks for sizes whole: closed=[path]"
            )
        *others, last = self._ways(values)
        for tensors in others:
            try:
                return self._recorded(inputs, tensors, last)
            except AutopipeError:
                continue  # rows matter
        return self._recorded(inputs, last, last)

    def _recorded(
        self, inputs: Inputs, tensors: dict[str, torch.Tensor], values: Mapping[str, torch.Tensor]
    ) -> dict[bool, Form]:
        made = self.made
        with self._in_session(inputs, tensors, self._n_rows(values)) as session:
            forms = forms_on(session, made, tensors)
            _check_recurring(forms.values())
            made.variations[id(forms[False])].check(inputs, values)
            if not all(made.is_answered(form, values) for form in forms.values()):
                raise CaptureError("fewer rows answer otherwise what the model asks of all")
            return self._added(forms)

    def asked_of_more(
        self,
        training: bool,
        place: int,
        inputs: Inputs,
        values: Mapping[str, torch.Tensor],
        n_rows: int,
        tail: Tail,
    ) -> Mixing:
        """How rows depend on one another in the form at a ``place`` among those of a mode, of ``n_rows`` too.

        Ahead of its ``tail``, if it has any. It is run on rows of the ``values``. Raises
        :class:`AutopipeError` where these do not ask for it.
        """
        check_untransformed(inputs.model)
        made = self.made
        each = {flag: [*forms, *made.for_sizes[flag]] for flag, forms in made.forms.items()}
        form = each[training][place]
        for tensors in self._ways(values):
            with self._in_session(inputs, tensors, n_rows) as session:
                if made.is_answered(form, tensors):
                    beside = {flag: forms[place] for flag, forms in each.items() if place < len(forms)}
                    is_of_both = place == 0 or all(other is form for other in beside.values())
                    asked = beside if is_of_both else {training: form}
                    return mixing_of(session, asked, tensors, made.variations[id(form)], tail)
        raise CaptureError("fewer rows answer otherwise what the model asks of all")

    @contextlib.contextmanager
    def _in_session(
        self, inputs: Inputs, tensors: Mapping[str, torch.Tensor], n_rows: int
    ) -> Iterator[Session]:
        """Within it there is what runs the model as it is now, on fewer rows of a batch of ``n_rows``."""

        def is_open(path: str) -> bool:
            return not self._attempt.policy.is_inside_leaf(path)

        model = self._model
        with (
            in_turn(),
            seldom_searched(),
            torch.inference_mode(False),
            all_on(self._device, model),
            switched_off(model),
            unseen(),
            preserved(model, is_open, holds_back=True) as snapshot,
        ):
            args, kwargs = inputs.rebuild(model, tensors)
            self.made.session = session = self.session(args, kwargs, snapshot, n_rows)
            try:
                yield session
            finally:
                self._rest()

    def _n_rows(self, values: Mapping[str, torch.Tensor]) -> int:
        """How many rows a batch has; 0 where its inputs have unlike numbers of them, or it has none."""
        batch = batch_dim(self.made.variation.dims)
        sizes = {values[name].shape[axis] for name, axis in batch.where} if batch is not None else ()
        return next(iter(sizes)) if len(sizes) == 1 else 0

    def _added(self, forms: Mapping[bool, Recording]) -> dict[bool, Form]:
        for flag, form in forms.items():
            self.made.add(flag, form)
        graphs = {id(form): self.made.graph(form) for form in forms.values()}
        return {flag: graphs[id(form)] for flag, form in forms.items()}

    def _rest(self) -> None:
        """Let go of copies of the model's state and of what was computed."""
        self.made.explorers.clear()
        del self.made.session

    def _ways(self, values: Mapping[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
        """The inputs with as many rows as the example was recorded with, then as they are."""
        own = {n: t.detach().to(self._device).requires_grad_(t.requires_grad) for n, t in values.items()}
        batch = batch_dim(self.made.variation.dims)
        if batch is not None and not batch.packed and self._n_rows(own) not in (0, batch.example):
            now = dataclasses.replace(batch, example=self._n_rows(own))
            yield sizing.resize(own, {now: batch.example})
        yield own


def _check_recurring(forms: Iterable[Recording]) -> None:
    """Raise :class:`CaptureError` for forms of data that hardly come again: more than a truth or a count."""
    for branch in (b for form in forms for b in form.branches if not b.of_setting):
        if not isinstance(branch.outcome, int):
            kind = type(branch.outcome).__name__
            raise CaptureError(f"what is read there, a {kind}, will hardly have the same value again")
