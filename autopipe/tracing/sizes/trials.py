"""The runs that a search for sizes that vary takes: recordings at other sizes, held against the model.

Which sizes are tried, and what follows, is left to ``explore``; running a recording to ``rerun``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import CaptureError
from ...graph import Dim
from ..calls.call import Guard, Recording
from ..calls.faults import of_models, raise_again
from ..calls.functions import ExportFlags
from ..calls.kinds import Kind
from ..calls.sharing import Sharing
from ..code.attributes import names_of_open
from ..inputs.arguments import Inputs
from ..inputs.structure import Spec, flatten
from ..members import registered
from ..state.example_data import are_close, close_to, projected, without_graphs
from ..state.global_names import is_foreign
from ..state.redraw import redrawn
from ..state.state import seed
from . import dims as sizing
from .guards import broken
from .rerun import Observation, Seen, buffers_written, replay

__all__ = ["Elsewhere", "Explorer", "Trial", "first", "first_line"]

_logger = logging.getLogger("autopipe")
_EXPORTED = "; torch.export wrote that size down: give it dynamic_shapes, or split what was exported"
_DIFFERS = "the captured graph's outputs differ from the model's"
_HOLDS_BACK = frozenset({"detach", "detach_", "inference_mode", "no_grad", "set_grad_enabled"})
_LEAVES = "the captured graph leaves the model's buffers otherwise than the model does"


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """What the forms showed at these sizes; their results are right where it ``is_whole``."""

    sizes: Mapping[Dim, int]
    seen: tuple[Observation, ...]
    is_whole: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Elsewhere:
    """What a form showed, by id of a call, at sizes that it does not run at or is not right for."""

    sizes: Mapping[Dim, int]
    form: Recording
    numbers: Mapping[int, Any]
    shapes: Mapping[int, Seen]


_Answer = tuple[list[Any], Spec, tuple[torch.Tensor, ...]]
"""What the model gives, as leaves and their structure, and the buffers that forms write as it leaves them."""


class Explorer:
    """The runs of one search: the forms at other sizes, and the model itself to compare with.

    ``call`` runs the model on tensors by placeholder name, ``given`` are the example's; ``start`` puts it
    back as it was given, in training mode or not: a run at one size may leave attributes that do not fit
    another; ``kind`` tells what a leaf is; ``is_asked_for`` whether inputs are of the kind that the forms are
    for, where there are several. ``by_mode`` says that a form in training is for training alone,
    ``is_of_a_kind`` that others are for sizes of other kinds. The example is of a batch of ``n_rows``, where
    that is known.
    ``functions`` are those of the model's code whose questions about sizes come out differently, so that it
    would be of use to keep them whole. ``elsewhere`` holds what forms showed of sizes that they are not right
    for, as far as they ran. ``spared`` holds, by id of a guard, the sizes at which it came out
    differently and did no harm; ``harmless`` are those that do none wherever that was tried.
    """

    def __init__(
        self,
        model: nn.Module,
        forms: Sequence[Recording],
        inputs: Inputs,
        call: Callable[[Mapping[str, torch.Tensor]], Any],
        given: Mapping[str, torch.Tensor],
        device: torch.device,
        start: Callable[[bool], None],
        kind: Callable[[str], Kind],
        is_asked_for: Callable[[Mapping[str, torch.Tensor]], bool] | None = None,
    ) -> None:
        self.model, self.forms, self.inputs = model, forms, inputs
        self.call, self.given, self.device, self.start = call, given, device, start
        self.kind, self.is_meta = kind, device.type == "meta"
        self.written = () if self.is_meta else buffers_written(model, forms)
        self.is_asked_for = is_asked_for
        self.takes_grad_mode = any(form.takes_grad_mode for form in forms)
        self.spared: dict[int, set[frozenset[tuple[Dim, int]]]] = {}
        self.harmless: set[int] = set()
        self.functions: dict[Any, None] = {}
        self.elsewhere: list[Elsewhere] = []
        self.by_mode = len(forms) > 1
        self.is_of_a_kind = False
        self.n_rows = 0
        self.drawn_out: set[Dim] = set()
        self.counted: set[Dim] = set()
        self.last_answer: tuple[Any, _Answer | Exception] | None = None
        self._redraws: int | None = None

    def prepare(self, form: Recording, training: bool | None = None) -> None:
        """Put the model and the generators in the same state every time, and the model in the form's mode."""
        self.start(self.mode(form, training))
        seed(self.device)

    def mode(self, form: Recording, training: bool | None) -> bool:
        """The mode that is asked for, else the form's own."""
        return (form.training and self.by_mode) if training is None else training

    def resized(self, sizes: Mapping[Dim, int]) -> dict[str, torch.Tensor]:
        """The example's tensors at other sizes, in the way that the model takes them."""
        given = sizing.resize(self.given, sizes, self.drawn_out, self.counted)
        if self._redraws is None:
            return given
        return next(itertools.islice(redrawn(given, seed=1), self._redraws, None), given)

    def run(self, sizes: Mapping[Dim, int]) -> Trial:
        """Replay every form; raises what the model raises.

        A guard that fails is spared where the result is the model's all the same; else raises
        :class:`_Changed`.
        """
        return self._run(sizes, [Sharing(self.kind) if self.is_meta else None for _ in self.forms])

    def sketch(self, sizes: Mapping[Dim, int]) -> Trial:
        """:meth:`run` for what is seen alone, for which leaves of a kind need to run but once."""
        sharing = [Sharing(self.kind) for _ in self.forms]
        try:
            return self._run(sizes, sharing)
        except _Changed:
            raise
        except of_models():
            if any(s.is_used for s in sharing):  # it may come from data that are not right
                return self.run(sizes)
            raise

    def _run(self, sizes: Mapping[Dim, int], sharing: Sequence[Sharing | None]) -> Trial:
        seen = tuple(map(self._replayed, self.forms, itertools.repeat(sizes), sharing))
        trial = Trial(sizes, seen, self.is_meta or not any(s and s.is_used for s in sharing))
        failed = self._failed(seen)
        pins = [said for g, said in failed if g.stays]
        if pins or (failed and self._does_harm(trial)):
            inside = {g.inside: None for g, _ in failed if g.inside is not None}
            if inside and self.is_taken(sizes):  # else the model is not free there whoever asks
                self.functions.update(inside)
            for form, shown in zip(self.forms, seen, strict=True):
                self.elsewhere.append(Elsewhere(sizes, form, shown.numbers, shown.shapes))
            raise _Changed((pins or [failed[0][1]])[0])
        if failed and not self.is_meta and self._is_compared(sizes):  # on meta no data tell
            for guard, _ in failed:
                self.spared.setdefault(id(guard), set()).add(frozenset(sizes.items()))
        return trial

    def _failed(self, seen: Sequence[Observation]) -> list[tuple[Guard, str]]:
        """The guards that came out differently, and how; not those that do no harm."""
        return [
            (g, said)
            for form, shown in zip(self.forms, seen, strict=True)
            for g in form.guards
            if id(g) not in self.harmless and (said := broken(g, shown.numbers))
        ]

    @property
    def _modes(self) -> tuple[bool | None, ...]:
        """The form's own mode, and the other: a form of both may ask in one of them alone."""
        return (None,) if self.by_mode or self.is_meta else (None, True)

    def _does_harm(self, trial: Trial, modes: Sequence[bool | None] | None = None) -> bool:
        """Whether a form in which a guard came out differently is not the model there, in these modes."""
        failed = {id(g) for g, _ in self._failed(trial.seen)}
        forms = [f for f in self.forms if any(id(g) in failed for g in f.guards)]
        return any(
            self.differs(trial, form, training) or self._trains_otherwise(trial, form, training)
            for form in forms
            for training in (self._modes if modes is None else modes)
        )

    def _trains_otherwise(self, trial: Trial, form: Recording, training: bool | None) -> bool:
        """Whether a form's gradients are not the model's, of which its code may hold some back."""
        weights = [p for p in self.model.parameters() if p.requires_grad]
        if not self._may_hold_back or not self._is_compared(trial.sizes):
            return False
        try:
            answered = self._answer(trial.sizes, form, training, has_gradients=True)[0]
            expected = projected(answered, weights)
            replayed = self._replayed(form, trial.sizes, training=training, has_gradients=True)
            found = projected(replayed.result, weights)
        except of_models() as error:  # any Python of the model, which may take no gradients
            _logger.debug("gradients could not be compared: %s", error)
            return False
        return not all(map(close_to, expected, found))

    @functools.cached_property
    def _may_hold_back(self) -> bool:
        """Whether the model's own code names what gives values that gradients do not pass."""
        own = frozenset(type(m) for m in self.model.modules() if not is_foreign(type(m).__module__))
        return not self.is_meta and not _HOLDS_BACK.isdisjoint(names_of_open(own))

    def judge(self, sizes: Mapping[Dim, int]) -> tuple[set[int], bool]:
        """Ids of the guards that come out differently at these sizes, and whether the result is the model's.

        All of them where the forms fail and the model does not; none where the model fails, or where inputs
        of these sizes ask for another form.
        """
        if not self._is_compared(sizes) or not self.is_taken(sizes):
            return set(), True
        everything = {id(g) for form in self.forms for g in form.guards} - self.harmless
        try:
            seen = tuple(self._replayed(form, sizes) for form in self.forms)
        except of_models():  # whatever it is, the model does not raise it
            return everything, False
        failed = [g for g, _ in self._failed(seen)]
        if any(g.stays for g in failed):
            return everything, False
        return {id(g) for g in failed}, not (failed and self._harms(Trial(sizes, seen, True)))

    def _harms(self, trial: Trial) -> bool:
        """Whether a form is not the model on the trial's own data, or on others in whichever mode."""
        own, *rest = self._modes
        if self._does_harm(trial, [own]):
            return True
        unlike = self._harms_unlike(trial.sizes)
        return self._does_harm(trial, rest) if unlike is None else unlike

    def _harms_unlike(self, sizes: Mapping[Dim, int]) -> bool | None:
        """Whether a form is not the model on other data of these sizes: what comes again may hide it.

        Of so many rows that come again the largest few are one, however few they are. None where no others
        can be tried.
        """
        for choice in () if self.is_meta else range(2):
            self.last_answer, self._redraws = None, choice
            try:
                if self._is_compared(sizes):
                    self._answered(sizes)
                    seen = tuple(self._replayed(form, sizes) for form in self.forms)
                    return self._does_harm(Trial(sizes, seen, True))
            except of_models() as error:  # any Python of the model, on data that it may not take
                _logger.debug("other data could not be tried: %s", error)
            finally:
                self.last_answer, self._redraws = None, None
        return None

    def _replayed(
        self,
        form: Recording,
        sizes: Mapping[Dim, int],
        sharing: Sharing | None = None,
        training: bool | None = None,
        *,
        has_gradients: bool = False,
    ) -> Observation:
        given = self.resized(sizes)
        self.prepare(form, training)
        shapes: dict[int, Seen] = {}
        numbers: dict[int, Any] = {}
        try:
            with torch.set_grad_enabled(self.takes_grad_mode or has_gradients):
                seen = replay(self.model, form, given, self.device, sharing, None, (shapes, numbers))
        except Exception:
            self.elsewhere.append(Elsewhere(sizes, form, numbers, shapes))
            raise
        result = seen.result if has_gradients else tuple(without_graphs(seen.result))
        return dataclasses.replace(seen, result=result, left=self._left())

    def _left(self) -> tuple[torch.Tensor, ...]:
        """A copy of every buffer that a form writes, as the run that has just been made left it."""
        return tuple(registered(self.model, name).detach().clone() for name in self.written)

    def shown(self, trial: Trial, form: Recording | None = None, training: bool | None = None) -> Observation:
        """What a run of a form showed, of the last where none is named, with its own data."""
        form = self.forms[-1] if form is None else form
        place = next(i for i, each in enumerate(self.forms) if each is form)
        is_seen = trial.is_whole and training is None
        return trial.seen[place] if is_seen else self._replayed(form, trial.sizes, training=training)

    def differs(
        self,
        trial: Trial,
        form: Recording | None = None,
        training: bool | None = None,
        *,
        is_shared: bool = True,
    ) -> str:
        """How a form's result differs from the model's own at the trial's sizes; "" if it does not.

        Of the last form where none is named, in its own mode or another. Nor can it differ where inputs of
        these sizes ask for another form. On the meta device, where only shapes are seen, alike leaves of the
        model run once unless not ``is_shared``.
        """
        if not self._is_compared(trial.sizes):
            return ""
        try:
            expected, spec, kept = self._answered(trial.sizes, form, training, is_shared)
        except of_models() as error:
            is_exported = hasattr(self.model, "_guards_fn")
            return f"the model itself fails: {first_line(error)}{_EXPORTED if is_exported else ''}"
        try:
            shown = self.shown(trial, form, training)
        except of_models() as error:
            return f"the captured graph fails: {first_line(error)}"
        found = shown.result
        if len(expected) != len(found):
            return f"the model returns {len(expected)} values there, the captured graph {len(found)}"
        if spec != (self.forms[-1] if form is None else form).output:
            return "the model returns what it returns under other names there"
        for a, b in zip(expected, found, strict=True):
            if not close_to(a, b):
                return f"{_DIFFERS} there"
        if not all(map(close_to, kept, shown.left)):
            return f"{_LEAVES} there"
        return ""

    def _is_compared(self, sizes: Mapping[Dim, int]) -> bool:
        return self.is_meta or self.is_asked_for is None or self.is_asked_for(self.resized(sizes))

    def keeps_rows(self, trial: Trial) -> bool:
        """Whether the results of samples that the example has are the same with more of them."""
        try:
            grown = self.shown(trial).result
        except of_models():  # whatever it is: then nothing is kept
            return False
        for before, after in zip(self._example.result, grown, strict=True):
            if all(isinstance(t, torch.Tensor) and t.dim() for t in (before, after)):
                is_longer = len(after) > len(before) and after.shape[1:] == before.shape[1:]
                if is_longer and not close_to(before, after[: len(before)]):
                    return False
        return True

    @functools.cached_property
    def _example(self) -> Observation:
        return self.run({}).seen[-1]

    def _answered(
        self,
        sizes: Mapping[Dim, int],
        form: Recording | None = None,
        training: bool | None = None,
        is_shared: bool = True,
    ) -> _Answer:
        """What the model itself gives, in a mode as in :meth:`differs`; raises what it raises.

        Asked once more for the same, it is what the last run gave or raised.
        """
        form = self.forms[-1] if form is None else form
        way = frozenset(self.drawn_out), frozenset(self.counted)
        key = frozenset(sizes.items()), self.mode(form, training), way, self.is_meta and (id(form), is_shared)
        if self.last_answer is None or self.last_answer[0] != key:
            try:
                self.last_answer = key, self._answer(sizes, form, training, is_shared)
            except of_models() as error:  # whatever it is, it is raised below
                self.last_answer = key, error
        answer = self.last_answer[1]
        if isinstance(answer, Exception):
            raise_again(answer)
        return answer

    def _answer(
        self,
        sizes: Mapping[Dim, int],
        form: Recording,
        training: bool | None = None,
        is_shared: bool = True,
        *,
        has_gradients: bool = False,
    ) -> _Answer:
        """What the model gives in a run of its own."""
        self.prepare(form, training)
        flags = ExportFlags.read()
        if self.is_meta:  # there is no data that the model could look at
            ExportFlags(True, True).write()
        is_shared = is_shared and self.is_meta
        try:
            shared = Sharing(self.kind).among(self.model, form.calls if is_shared else ())
            with torch.set_grad_enabled(self.takes_grad_mode or has_gradients), shared:
                leaves, spec = flatten(self.call(self.resized(sizes)))
                return leaves if has_gradients else without_graphs(leaves), spec, self._left()
        finally:
            flags.write()

    def is_taken(self, sizes: Mapping[Dim, int]) -> bool:
        """Whether the model itself runs at these sizes."""
        try:
            self._answered(sizes)
        except of_models():  # whatever it is: then the model does not take them
            return False
        return True

    def check_example(self) -> None:
        """Raise :class:`CaptureError` where the captured graph is not the model on the example itself.

        A model that answers twice differently, as one that draws from other generators than torch's, is not
        held to it.
        """
        trial = first(self.run, [{}])
        said = self.differs(trial) if isinstance(trial, Trial) else ""
        answers = [self._answer({}, self.forms[-1])[0] for _ in range(2)] if said.startswith(_DIFFERS) else []
        if answers and are_close(*answers):
            raise CaptureError(
                f"{self.inputs.model}: {_DIFFERS} on the example itself: code of the model computes "
                "something else while it is traced; pass an example that takes no shortcut (a mask that "
                "masks something), another implementation of the layer (attn_implementation='eager' in "
                "transformers), or closed=[path] of the module"
            )


class _Changed(Exception):
    """A guard came out differently."""


def first(run: Callable[[Mapping[Dim, int]], Trial], choices: Sequence[Mapping[Dim, int]]) -> Trial | str:
    """The first choice of sizes that runs, else why the last one does not."""
    reason = "nothing else to try"
    for sizes in choices:
        at = ", ".join(map(str, sizes.values()))
        try:
            return run(sizes)
        except _Changed as error:
            reason = f"at {at}, {error}"
        except of_models() as error:
            reason = f"at {at} it fails: {first_line(error)}"
    return reason


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
