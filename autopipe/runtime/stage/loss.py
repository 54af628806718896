"""The loss of each microbatch, or of all at once where theirs do not weigh up to it.

Which of the two is left to ``choice``, one call to ``loss_call``, what is asked to ``asking``, and how much
each microbatch weighs to ``weights``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import CaptureError, InputError
from ...tracing.inputs.structure import mapped
from ...tracing.sizes.other_masks import LEFT_OUT
from ...tracing.state.iterators import Spent
from ..data.call_kinds import Kinds
from ..data.microbatch import Batch
from ..data.outputs import NotThereError
from ..options import Options
from .asking import Parts, Question, Subject, joined_targets, left_out
from .choice import Choice
from .held import Held
from .loss_call import LossCall
from .worker import StepInputs

__all__ = ["Loss"]

_logger = logging.getLogger(__name__)

_TAKES_ITEMS = "loss_fn takes items from an iterator, one call's each"


class Loss:
    """What a runtime trains on: the user's ``loss_fn(output, target)``, or the loss in the model's output.

    A ``loss_fn`` is any Python, so what it averages over cannot be read: in some steps it is asked whether
    one call for all microbatches gives the loss and gradients that theirs weigh up to, of the batch and of
    targets in other places, and leaves the same buffers and counts. Such a step runs every forward first and
    is right either way; what it keeps is put back in between. Where two microbatches alone are asked about,
    a loss that answers no is refused.

    Attributes
    ----------
    choice: says how the loss of each step is made. call: makes one.
    """

    def __init__(
        self, kinds: Kinds, options: Options, device: torch.device, *, is_on_host: bool, is_torchs: bool
    ) -> None:
        """``is_on_host``: whether all ranks' devices are. ``is_torchs``: whether the loss is torch's own."""
        self.choice = Choice(options, is_on_host=is_on_host, is_torchs=is_torchs)
        self.call = LossCall(kinds, options.loss_fn)
        self._kinds, self._loss_fn, self._device = kinds, options.loss_fn, device
        self._target_axis = (options.batch_dims or {}).get("target", 0) or 0
        self._has_warned = False
        self._step: StepInputs | None = None
        self._subjects: list[Subject] | None = None

    def begin(self, step: StepInputs) -> None:
        """Take up a step, in which nothing is asked about yet."""
        self._step, self._subjects = step, None
        self.call.begin(step)

    def end(self) -> None:
        """Drop what belongs to a step, wherever that ended."""
        self._step = self._subjects = self.call.failure = None

    @property
    def has_to_ask(self) -> bool:
        """Whether the step under way is to ask, as this rank alone may know."""
        return self._step is not None and self.choice.has_to_ask(self._step.batch.targets)

    @property
    def gathers(self) -> bool:
        """Whether it takes the outputs of the step's microbatches all at once, by :meth:`of_batch`."""
        return self.choice.manner in ("asked", "batch")

    @property
    def is_asked(self) -> bool:
        """Whether what :meth:`of_batch` gives is to be told beside the losses of microbatches."""
        return self.choice.manner == "asked"

    def __call__(self, outputs: Sequence[Any], target: Any, m: int) -> Tensor | None:
        """The loss of microbatch ``m``; None where ``loss_fn`` does not take that, and may take the batch.

        Raises :class:`InputError` where there is none to train on.
        """
        step = self._step
        if self.choice.manner == "each" or step is None:
            return self.call(outputs, target, m)
        if self._subjects is None:
            self._subjects = self._asked_together(step)
        subject = next((s for s in self._subjects if m in s.span), None)
        if subject is None:
            return self.call(outputs, target, m)
        self._take(subject, step, outputs, target, m)
        if subject.takes_items:
            return None
        try:
            loss = self.call(outputs, target, m)
        except Exception as error:
            if error is not self.call.failure or not self.is_asked:
                raise
            return None
        subject.losses[m] = loss.detach()
        if not self.is_asked and len(subject.losses) == len(subject.span):
            self._subjects.remove(subject)
            self._ask_of_some(step, subject)
        return loss

    def of_batch(self, parts: Parts) -> Tensor | None:
        """The loss of all microbatches, whose outputs' leaves are ``parts``, in one call.

        None where it is asked, and those of microbatches weigh up to it. Raises :class:`InputError` where
        there is none to train on, or microbatches do not make the batch's outputs.
        """
        assert self._step is not None
        if self.is_asked:
            return self._of_batch_if_other(self._step, parts)
        batch = self._step.batch
        return self.call(self._join(batch, parts), batch.as_one(self._device).targets[0])

    # -- asking -------------------------------------------------------------------------------------

    def _asked_together(self, step: StepInputs) -> list[Subject]:
        """What is asked about in a step: all microbatches, or pairs that are cut alike."""
        rows = step.batch.rows
        n = len(rows)
        if self.is_asked:
            return [Subject(range(n))]
        if not step.grad:
            return []
        is_ragged = n > 3 and rows[-1] not in rows[:2]
        return [Subject(range(2)), *([Subject(range(n - 2, n))] if is_ragged else [])]

    def _take(self, subject: Subject, step: StepInputs, outputs: Sequence[Any], target: Any, m: int) -> None:
        """Keep what a microbatch is asked about with: the loss may write to what it is given."""
        if not subject.targets:
            subject.held = self._hold()
            subject.takes_items = self._takes_items(subject.held, outputs, target)
            subject.target = _copy(step.batch.as_one(self._device).targets[0]) if self.is_asked else None
        subject.targets[m] = _copy(target)
        if not self.is_asked:  # else the last stage keeps them
            subject.outputs[m] = _copy(outputs)

    def _hold(self) -> Held | None:
        """What ``loss_fn`` keeps; None where that cannot be told, as of a model that other ranks have."""
        assert self._step is not None
        try:
            return Held(self._loss_fn, self._kinds[self._step.batch.kind].capture.model, self._device)
        except Exception:
            _logger.debug("what loss_fn keeps cannot be told", exc_info=True)
            return None

    def _takes_items(self, held: Held | None, outputs: Sequence[Any], target: Any) -> bool:
        """Whether it takes items from an iterator that it reaches: it is called while these are put aside.

        Raises :class:`InputError` where it does, and the whole batch cannot be taken in its place.
        """
        loss_fn, step = self._loss_fn, self._step
        if held is None or step is None or loss_fn is None or not held.snapshot.reached.exhaustible:
            return False
        aside = Spent(held.snapshot.model, held.snapshot.reached)
        try:
            with torch.enable_grad():
                given = [_with_gradient(x) for x in _copy(outputs)]
                loss_fn(self._kinds[step.batch.kind].capture.assemble(given), _copy(target))
        except CaptureError:
            if not self.is_asked:
                raise InputError(f"{_TAKES_ITEMS}: pass loss_on='batch' for it") from None
            return True
        except Exception:  # any Python
            _logger.debug("loss_fn does not take a microbatch", exc_info=True)
        finally:
            aside.put_back()
            held.put_back()
        return False

    def _of_batch_if_other(self, step: StepInputs, parts: Parts) -> Tensor | None:
        """The loss of the whole batch where it is another one than those of microbatches weigh up to."""
        if self._subjects is None:  # a stage that runs again has not called it yet
            (subject,) = self._subjects = self._asked_together(step)
            for m, target in enumerate(step.batch.targets):
                self._take(subject, step, parts[m], target, m)
        if self._subjects[0].takes_items:
            self.choice.find()
            self._tell_whole(_TAKES_ITEMS, LEFT_OUT)
            return self.call(self._join(step.batch, parts), step.batch.as_one(self._device).targets[0])
        (subject,), after, failure = self._subjects, self._hold(), self.call.failure
        self.choice.manner, held = "each", subject.held
        if held is None or after is None or not held.can_put_back:
            if failure is not None:
                raise failure
            self._warn("what it keeps from call to call cannot be put back")
            return None
        has_graph = not torch.is_inference_mode_enabled()
        if not step.grad and has_graph:
            parts = [[_with_gradient(x) for x in part] for part in parts]
        given = [subject.losses.get(m) for m in subject.span]
        targets = [subject.targets[m] for m in subject.span]
        self.call.looks = step.grad
        try:
            with torch.set_grad_enabled(has_graph):
                question = self._question(step.batch, step.weights, parts, targets, subject.target, held)
                verdict = question.ask(given, step.batch.cut, self.call)
        except Exception as error:  # any Python: it may want the sizes of one microbatch
            after.put_back()
            if failure is not None:
                raise failure from error
            is_its_own = error is self.call.failure
            if isinstance(error, NotThereError) or (isinstance(error, InputError) and is_its_own):
                raise
            if not is_its_own:  # as where it checkpoints by re-entering, of which no gradient is taken alone
                self._warn(
                    str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
                )
            _logger.debug("loss_fn does not take several microbatches together", exc_info=True)
            return None
        if verdict.why and verdict.is_told:
            self.choice.find()
            self._tell_whole(verdict.why, left_out(targets, verdict.losses, verdict.loss.item()))
            return verdict.loss
        after.put_back()
        self.choice.note(targets, verdict, after.snapshot)
        if verdict.why:
            self._warn(f"{verdict.why}, and for one of them again not what it gave before")
        return None

    def _ask_of_some(self, step: StepInputs, subject: Subject) -> None:
        """Raise :class:`InputError` where the loss of some microbatches is not what theirs weigh up to."""
        held, after, span = subject.held, self._hold(), subject.span
        if held is None or after is None or not held.can_put_back:
            return
        parts = [[_with_gradient(x) for x in subject.outputs[m]] for m in span]
        targets = [subject.targets[m] for m in span]
        weights = step.weights[span.start : span.stop]
        if not self._kinds[step.batch.kind].weigher.is_sum:
            if not (total := float(sum(weights))):
                return
            weights = [w / total for w in weights]
        try:
            target = joined_targets(targets, self._target_axis)
            with torch.enable_grad():
                batch = step.batch.part(span.start, span.stop)
                question = self._question(batch, weights, parts, targets, target, held)
                verdict = question.ask([subject.losses[m] for m in span], None, question.call)
        except NotThereError:
            raise
        except Exception:  # any Python: it may count calls, or want the sizes of one microbatch
            _logger.debug("loss_fn does not take several microbatches together", exc_info=True)
            return
        finally:
            after.put_back()
        self.choice.note(targets, verdict, after.snapshot)
        if verdict.why and verdict.is_told:
            label = left_out(targets, verdict.losses, verdict.loss.item())
            raise InputError(
                "the loss of the full batch is not the weighted sum of loss_fn's losses of its microbatches: "
                f"{verdict.why}; pass loss_on='batch' for a loss that compares rows or keeps something from "
                "call to call, for which the activations of all microbatches are kept, loss_weight=lambda "
                f"args, kwargs, target: (target != {label}).sum() for a mean over labels that count, "
                "loss_reduction='sum' for a sum, or loss_on='microbatches' to take each for a batch"
            )

    def _question(
        self,
        batch: Batch,
        weights: Sequence[float | Tensor],
        parts: Parts,
        targets: Sequence[Any],
        target: Any,
        held: Held,
    ) -> Question:
        loss_fn, capture = self._loss_fn, self._kinds[batch.kind].capture
        assert loss_fn is not None

        def call(outputs: Sequence[Any], target: Any) -> Tensor:
            return loss_fn(capture.assemble(outputs), target)

        return Question(call, functools.partial(self._join, batch), parts, weights, targets, target, held)

    def _join(self, batch: Batch, parts: Parts) -> Sequence[Any]:
        """Flat outputs of several microbatches."""
        assert self._step is not None
        kind = self._kinds[batch.kind]
        weights = kind.weigher.beside(batch) or kind.weigher.in_outputs(
            batch, self._step.weights[: len(parts)]
        )
        return kind.outputs.join(parts, batch, weights, for_loss=True)

    # -- words --------------------------------------------------------------------------------------

    def _tell_whole(self, why: str, label: int) -> None:
        """That all further losses are of the whole batch, and which label may be left out."""
        _logger.warning(
            "loss_fn is called once on the whole batch, as its losses of microbatches do not weigh up to the "
            "batch's: %s. From now on every forward runs before the first backward (schedule 'gpipe' or "
            "'looped-bfs'), and the activations of all microbatches are kept; loss_on='batch' asks for that, "
            "and in split() plans for it. "
            "A mean over labels that count does without, under loss_weight=lambda args, kwargs, target: "
            "(target != %d).sum(), one that the model makes with no loss_fn, a sum under "
            "loss_reduction='sum'; loss_on='microbatches' takes each microbatch for a batch",
            why,
            label,
        )

    def _warn(self, why: str) -> None:
        """Once, of what could not be told."""
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "whether the loss of the full batch is the weighted sum of loss_fn's losses of its "
                "microbatches cannot be told, and it is called on each: %s; pass loss_on='microbatches' "
                "where it is, or n_microbatches=1",
                why,
            )


def _copy(values: Any) -> Any:
    """The same with tensors in another place in memory, which have no gradients."""
    return mapped(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, values)


def _with_gradient(value: Any) -> Any:
    """The same tensor, which gathers gradients where it can."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point() or value.is_complex())
