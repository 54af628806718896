"""Records further forms of a captured model, for inputs of later calls that no form covers.

Which form inputs ask for is left to ``captured``, what makes a recording a form to ``forms_by_size``.
"""

from __future__ import annotations

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
from .runs.session import Session
from .sizes import dims as sizing
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

    def session(self, args: tuple[Any, ...], kwargs: dict[str, Any], snapshot: Snapshot) -> Session:
        """What records the model as it was recorded, on other arguments; no further leaf is opened."""
        attempt, made = self._attempt, self.made
        found = Session(self._model, args, kwargs, attempt.policy, snapshot, sizes_vary=bool(made.dynamic))
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
        made, model = self.made, self._model

        def is_open(path: str) -> bool:
            return not self._attempt.policy.is_inside_leaf(path)

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
            made.session = session = self.session(args, kwargs, snapshot)
            try:
                forms = forms_on(session, made, tensors)
                _check_recurring(forms.values())
                made.variations[id(forms[False])].check(inputs, values)
                if not all(made.is_answered(form, values) for form in forms.values()):
                    raise CaptureError("fewer rows answer otherwise what the model asks of all")
                return self._added(forms)
            finally:
                self._rest()

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
        if batch is not None and not batch.packed:
            sizes = {own[name].shape[axis] for name, axis in batch.where}
            if len(sizes) == 1 and batch.example not in sizes:
                now = dataclasses.replace(batch, example=sizes.pop())
                yield sizing.resize(own, {now: batch.example})
        yield own


def _check_recurring(forms: Iterable[Recording]) -> None:
    """Raise :class:`CaptureError` for forms of data that hardly come again: more than a truth or a count."""
    for branch in (b for form in forms for b in form.branches if not b.of_setting):
        if not isinstance(branch.outcome, int):
            kind = type(branch.outcome).__name__
            raise CaptureError(f"what is read there, a {kind}, will hardly have the same value again")
