"""The loss of each microbatch, or of all at once where theirs do not weigh up to it.

How much each microbatch weighs is left to ``weights``, asking a loss to ``asking``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from ...errors import AutopipeError, InputError, StepError
from ...stages import own_loss
from ...tracing.inputs.structure import mapped
from ..data.call_kinds import Kinds
from ..data.microbatch import Batch
from ..options import Options, is_due
from .asking import Held, Parts, Question, Verdict, joined_targets, left_out, spread
from .left_behind import leaves_of, made_before, newest, reads_noted
from .worker import StepInputs

__all__ = ["Loss"]

_logger = logging.getLogger(__name__)

_MOST_CUTS = 8
"""So many ways to cut a batch in rows are asked about when they are met."""

Manner = Literal["batch", "asked", "pairs", "each"]
"""How a step's loss is made: once of all microbatches; of all or of each, as it answers when asked; of
each, with questions about the first two and the last two; of each."""


class Loss:
    """What a runtime trains on: the user's ``loss_fn(output, target)``, or the loss in the model's output.

    A ``loss_fn`` is any Python, so what it averages over cannot be read. Unless an option says it, it is
    asked at steps 0, 1, 2, 4, 8 and so on, where a batch is cut otherwise than before, and where microbatches
    first have unlike shares of labels that it may leave out: whether one call for all microbatches gives the
    loss and gradients that theirs weigh up to, of the batch and of targets in other places, and leaves the
    same buffers and counts. Such a step runs every forward first and is right either way; once the answer was
    no, as it is of a loss that draws, all further steps are of the whole batch. Where memory has no room for
    that, and of torch's own losses, two microbatches are asked about, and a loss that answers no is refused.

    Attributes
    ----------
    trains: the parameters, by id, that it may train beside the model's, since all ranks share their
        gradients; None where it may train any. Others are refused at those steps: ranks that make the same
        optimizer would have no gradient of them.
    away: ids of the parameters that other ranks alone have. What layers of theirs set in a forward is
        refused at those steps, and what any stage has left that is not of the microbatch.
    manner: how the loss of the step under way is made.
    is_on_batch: whether all further losses are made of the whole batch, as far as this rank knows.
    has_found: whether this rank has found that they are to be.
    """

    def __init__(
        self,
        kinds: Kinds,
        options: Options,
        device: torch.device,
        *,
        is_on_host: bool,
        is_torchs: bool,
    ) -> None:
        """``is_on_host``: whether all ranks' devices are. ``is_torchs``: whether the loss is torch's own."""
        self._device, self._is_on_host = device, is_on_host
        self.trains: set[int] | None = None
        self.away: set[int] = set()
        self.manner: Manner = "each"
        self.is_on_batch, self.has_found = options.loss_on == "batch", False
        self._is_of_several = self._has_warned = False
        self._has_room: Callable[[], bool] = bool
        self._marks: set[int] = set()
        self._marks_asked: set[int] = set()
        self._kinds, self._loss_fn = kinds, options.loss_fn
        self._kind = kinds[0]
        self._target_axis = (options.batch_dims or {}).get("target", 0) or 0
        is_told = options.loss_weight is not None or options.loss_on is not None
        self._asks = options.loss_fn is not None and not is_told
        self._is_torchs, self._has_replicas = is_torchs, options.has_replicas
        self._taken: StepInputs | None = None
        self._held: Held | None = None
        self._target: Any = None
        self._given: dict[int, tuple[Sequence[Any], Any]] = {}
        self._seen: dict[int, Tensor] = {}
        self._failure: Exception | None = None
        self._rows: tuple[int, ...] = ()
        self._spans: list[range] | None = None
        self._cuts: set[tuple[int, tuple[int, ...]]] = set()
        self._n_steps = 0
        self._looks = False

    def choose(
        self, batch: Batch, *, grad: bool, n_done: int, has_room: Callable[[], bool], is_one: bool
    ) -> None:
        """Say how the loss of a step is made: every rank does, and alike.

        ``n_done``: how many steps are done, of those that all replicas make. ``has_room``: whether every rank
        has room for all microbatches. ``is_one``: whether there is one loss at most, whatever it is.
        """
        self.manner, self._has_room = "each", has_room
        self._is_of_several = batch.n_microbatches > 1 and not is_one
        if not self._is_of_several or not (self._asks or self.is_on_batch):
            return
        if self.is_on_batch:
            self.manner = "batch"
            return
        asks = self._is_due(n_done) if grad else not self._cuts
        cut = batch.kind, batch.rows
        if not self._has_replicas:  # which cut their batches each in its own way
            asks |= cut not in self._cuts and len(self._cuts) < _MOST_CUTS
        if asks:
            self._cuts.add(cut)
            self.ask()

    def ask(self) -> None:
        """Ask in the step that begins, as every rank does alike."""
        if self.manner == "each" and self._is_of_several:
            self.manner = "pairs" if self._is_torchs or not self._has_room() else "asked"

    def _is_due(self, n_done: int) -> bool:
        # each look waits for the device, so there it ends with the warm-up
        return is_due(n_done) and (n_done < 2 or self._is_on_host)

    def may_find(self, n_done: int) -> bool:
        """Whether replicas may find that it takes the whole batch after so many steps that all have made.

        On each the same, whatever its batch is.
        """
        return self._asks and not self.is_on_batch and self._is_due(n_done)

    def follow(self) -> None:
        """Another rank has found that losses are to be made of the whole batch."""
        self.is_on_batch = True
        self.manner = "batch" if self._is_of_several else "each"

    @property
    def has_to_ask(self) -> bool:
        """Whether labels of the step under way say that it is to be asked, which they do on one rank."""
        if self.manner != "each" or self._taken is None or self._has_replicas or not self._is_of_several:
            return False
        return bool(self._marks and spread(self._taken.batch.targets, self._marks - self._marks_asked))

    def begin(self, step: StepInputs) -> None:
        """Take up a step."""
        self._rows, self._kind, self._taken = step.batch.rows, self._kinds[step.batch.kind], step
        self._looks = self._loss_fn is not None and step.grad and is_due(self._n_steps)
        self._n_steps += step.grad
        self._given, self._seen, self._held, self._failure = {}, {}, None, None
        self._spans = None

    def end(self) -> None:
        """Drop what belongs to a step, wherever that ended."""
        self._taken = self._held = self._failure = self._target = None
        self._given, self._seen = {}, {}

    @property
    def gathers(self) -> bool:
        """Whether it takes the outputs of the step's microbatches all at once, by :meth:`of_batch`."""
        return self.manner in ("asked", "batch")

    @property
    def is_asked(self) -> bool:
        """Whether what :meth:`of_batch` gives is to be told beside the losses of microbatches."""
        return self.manner == "asked"

    def __call__(self, outputs: Sequence[Any], target: Any, m: int) -> Tensor | None:
        """The loss of microbatch ``m``; None where ``loss_fn`` does not take that, and may take the batch.

        Raises :class:`InputError` where there is none to train on.
        """
        step = self._taken
        if self.manner == "each" or step is None:
            return self._checked(outputs, target, m)
        if self._spans is None:
            self._spans = self._asked_together() if step.grad or self.is_asked else []
        span = next((s for s in self._spans if m in s), None)
        if span is not None and m == span.start and m not in self._seen:
            self._held = self._hold()
            self._target = _copy(step.batch.as_one(self._device).targets[0]) if self.is_asked else None
        if span is not None:  # it may write to what it is given
            self._given[m] = () if self.is_asked else _copy(outputs), _copy(target)
        try:
            loss = self._checked(outputs, target, m)
        except Exception as error:
            if error is not self._failure or not self.is_asked:
                raise
            return None
        if span is not None:
            self._seen[m] = loss.detach()
            if not self.is_asked and all(i in self._seen for i in span):
                self._spans.remove(span)
                self._ask_of_some(step, span)
        return loss

    def _hold(self) -> Held | None:
        """What ``loss_fn`` keeps; None where that cannot be told, as of a model that other ranks have."""
        try:
            return Held(self._loss_fn, self._kind.capture.model, self._device)
        except Exception:
            _logger.debug("what loss_fn keeps cannot be told", exc_info=True)
            return None

    def _asked_together(self) -> list[range]:
        """The microbatches that are asked about: all, or pairs that are cut alike."""
        n = len(self._rows)
        if self.is_asked:
            return [range(n)]
        is_ragged = n > 3 and self._rows[-1] not in self._rows[:2]
        return [range(2), range(n - 2, n)] if is_ragged else [range(2)]

    def of_batch(self, parts: Parts) -> Tensor | None:
        """The loss of all microbatches, whose outputs' leaves are ``parts``, in one call.

        None where it is asked, and those of microbatches weigh up to it. Raises :class:`InputError` where
        there is none to train on, or microbatches do not make the batch's outputs.
        """
        assert self._taken is not None
        if self.is_asked:
            return self._of_batch_if_other(self._taken, parts)
        batch = self._taken.batch
        return self._checked(self._join(batch, parts), batch.as_one(self._device).targets[0], None)

    def _join(self, batch: Batch, parts: Parts) -> Sequence[Any]:
        """Flat outputs of several microbatches."""
        assert self._taken is not None
        weigher, outputs = self._kind.weigher, self._kind.outputs
        weights = weigher.beside(batch) or weigher.in_outputs(batch, self._taken.weights[: len(parts)])
        return outputs.join(parts, batch, weights, for_loss=True)

    def _of_batch_if_other(self, step: StepInputs, parts: Parts) -> Tensor | None:
        """The loss of the whole batch where it is another one than those of microbatches weigh up to."""
        batch = step.batch
        held, after, failure = self._held, self._hold(), self._failure
        self.manner = "each"
        if held is None or after is None or not held.can_put_back:
            if failure is not None:
                raise failure
            self._warn("what it keeps from call to call cannot be put back")
            return None
        has_graph = not torch.is_inference_mode_enabled()
        if not step.grad and has_graph:
            parts = [[_with_gradient(x) for x in part] for part in parts]
        given = [self._seen.get(m) for m in range(len(parts))]
        targets = [target for _, target in self._given.values()]
        self._looks = step.grad
        try:
            with torch.set_grad_enabled(has_graph):
                question = self._question(step, batch, step.weights, parts, targets, self._target, held)
                verdict = question.ask(given, batch.cut, lambda o, t: self._checked(o, t, None))
        except Exception as error:  # any Python: it may want the sizes of one microbatch
            after.put_back()
            if failure is not None:
                raise failure from error
            if isinstance(error, InputError) and error is not self._failure:
                self._warn(str(error))
            _logger.debug("loss_fn does not take several microbatches together", exc_info=True)
            return None
        if verdict.why and verdict.is_told:
            self._take_whole(targets, verdict)
            return verdict.loss
        if not self._has_replicas:  # whose losses may call one another, as often on each
            self._note_marks(question)
        after.put_back()
        if verdict.why:
            self._warn(f"{verdict.why}, and for one of them again not what it gave before")
        return None

    def _take_whole(self, targets: Sequence[Any], verdict: Verdict) -> None:
        """All further losses are of the whole batch."""
        self.manner, self.has_found = "batch", True
        self.is_on_batch = not self._has_replicas  # which agree on it
        label = left_out(targets, verdict.losses, verdict.loss.item())
        _logger.warning(
            "loss_fn is called once on the whole batch, as its losses of microbatches do not weigh up to the "
            "batch's: %s. From now on every forward runs before the first backward (schedule 'gpipe' or "
            "'looped-bfs'), and the activations of all microbatches are kept; loss_on='batch' asks for that. "
            "A mean over labels that count does without, under loss_weight=lambda args, kwargs, target: "
            "(target != %d).sum(), one that the model makes with no loss_fn, a sum under "
            "loss_reduction='sum'; loss_on='microbatches' takes each microbatch for a batch",
            verdict.why,
            label,
        )

    def _ask_of_some(self, step: StepInputs, span: range) -> None:
        """Raise :class:`InputError` where the loss of some microbatches is not what theirs weigh up to."""
        given, held, after = [self._given[m] for m in span], self._held, self._hold()
        if held is None or after is None or not held.can_put_back:
            return
        batch = step.batch.part(span.start, span.stop)
        parts = [[_with_gradient(x) for x in part] for part, _ in given]
        targets = [target for _, target in given]
        weights = step.weights[span.start : span.stop]
        if not self._kind.weigher.is_sum:
            if not (total := float(sum(weights))):
                return
            weights = [w / total for w in weights]
        try:
            target = joined_targets(targets, self._target_axis)
            with torch.enable_grad():
                question = self._question(step, batch, weights, parts, targets, target, held)
                verdict = question.ask([self._seen[m] for m in span], None, question.call)
                if not self._has_replicas:
                    self._note_marks(question)
        except Exception:  # any Python: it may count calls, or want the sizes of one microbatch
            _logger.debug("loss_fn does not take several microbatches together", exc_info=True)
            return
        finally:
            after.put_back()
        if verdict.why and verdict.is_told:
            label = left_out(targets, verdict.losses, verdict.loss.item())
            raise InputError(
                "the loss of the full batch is not the weighted sum of loss_fn's losses of its microbatches: "
                f"{verdict.why}; pass loss_on='batch' for a loss that compares rows or keeps something from "
                "call to call, for which the activations of all microbatches are kept, loss_weight=lambda "
                f"args, kwargs, target: (target != {label}).sum() for a mean over labels that count, "
                "loss_reduction='sum' for a sum, or loss_on='microbatches' to take each for a batch"
            )

    def _note_marks(self, question: Question) -> None:
        """The labels that it may leave out, and those of them that it was now asked about."""
        self._marks |= question.marks()
        self._marks_asked |= spread(question.targets, self._marks)

    def _question(
        self,
        step: StepInputs,
        batch: Batch,
        weights: Sequence[float | Tensor],
        parts: Parts,
        targets: Sequence[Any],
        target: Any,
        held: Held,
    ) -> Question:
        loss_fn, capture = self._loss_fn, self._kind.capture
        assert loss_fn is not None

        def call(outputs: Sequence[Any], target: Any) -> Tensor:
            return loss_fn(capture.assemble(outputs), target)

        join = functools.partial(self._join, batch)
        return Question(call, join, parts, weights, targets, target, held)

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

    def _checked(self, outputs: Sequence[Any], target: Any, m: int | None) -> Tensor:
        """The loss of outputs, of microbatch ``m`` or of all; looked at where that is due."""
        capture, loss_fn = self._kind.capture, self._loss_fn
        output = capture.assemble(outputs)
        looks = self._looks and torch.is_grad_enabled()  # not where a stage that recomputes only looks ahead
        ends = _ends(outputs) if looks else set()
        before = _gradients(ends) if looks else []
        if loss_fn is None:
            loss = own_loss(capture, outputs)
        elif looks:
            loss = self._looked_at(loss_fn, output, target, m, ends)
        else:
            loss = self._made(loss_fn, output, target, m)
        if before != (_gradients(ends) if looks else []):
            raise InputError(
                "loss_fn calls backward(), which reaches this stage's parameters alone: the step makes the "
                "gradients of all of them; let loss_fn only return the loss, and for a gradient that it is "
                "made of call torch.autograd.grad(..., create_graph=True)"
            )
        if not isinstance(loss, Tensor) or loss.ndim != 0 or loss.is_complex():
            source = f"loss_fn returned {_told(loss)}" if loss_fn else "the model's output holds none"
            raise InputError(
                f"a step needs a real scalar loss, but {source}; pass loss_fn=lambda output, target: … that "
                "returns a 0-d tensor to runtime()"
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise InputError(
                "the loss does not require a gradient: loss_fn does not use the output, or every parameter "
                "it depends on is frozen; let one train, or take the loss alone with evaluate()"
            )
        if looks:
            self._looks = False
            if self.trains is not None:
                self._refuse_others(loss, ends)
        return loss

    def _made(self, loss_fn: Callable[[Any, Any], Tensor], output: Any, target: Any, m: int | None) -> Tensor:
        """What it gives. Raises :class:`InputError` where it fails without a target, tells of one row."""
        try:
            return loss_fn(output, target)
        except AutopipeError:
            raise
        except Exception as error:
            self._failure = self._explained(error, target, m)
            if self._failure is error:
                raise
            raise self._failure from error

    def _explained(self, error: Exception, target: Any, m: int | None) -> Exception:
        """What to raise where ``loss_fn`` fails."""
        told = f"{type(error).__name__}: {error}"
        if target is None:
            return InputError(
                f"the step was given no target, and loss_fn failed with None ({told}); pass one, as in "
                "rt.step(x, target=y), or give a loss_fn that does without"
            )
        if m is None or self._rows[m] > 1 or len(self._rows) == 1:
            return error
        return StepError(
            f"loss_fn failed on microbatch {m}, which is a single row of the batch's {sum(self._rows)} "
            f"({told}); where it drops the axis of rows, as squeeze() does, name the axis, as in "
            f"squeeze(-1), or pass n_microbatches={max(1, sum(self._rows) // 2)}"
        )

    def _looked_at(
        self, loss_fn: Callable[[Any, Any], Tensor], output: Any, target: Any, m: int | None, ends: set[Node]
    ) -> Tensor:
        """What it gives. Raises :class:`InputError` where it takes what a forward leaves beside its output.

        The outputs' own graphs begin at ``ends``. To a loss of the whole batch no layer leaves that.
        """
        capture, since = self._kind.capture, newest()
        away = self.away if m is not None else {id(p) for p in capture.model.parameters()}
        with reads_noted(capture.model, capture.left, away) as read:
            try:
                loss = self._made(loss_fn, output, target, m)
            except Exception as error:  # whatever comes of a value that is not the microbatch's
                if read:
                    raise InputError(_left(read, capture.ops.model)) from error
                raise
        own = {id(p) for p in capture.model.parameters()}
        if read or (isinstance(loss, Tensor) and loss.requires_grad and made_before(loss, ends, since, own)):
            raise InputError(_left(read, capture.ops.model))
        return loss

    def _refuse_others(self, loss: Tensor, ends: Iterable[Node]) -> None:
        own = {id(p) for p in self._kind.capture.model.parameters()} | (self.trains or set())
        others = [
            list(leaf.shape)
            for leaf in leaves_of([get_gradient_edge(loss).node], ends)
            if id(leaf) not in own
        ]
        if others:
            shapes = f"{', '.join(map(str, others[:3]))}{', …' if len(others) > 3 else ''}"
            name = self._kind.capture.ops.model
            raise InputError(
                f"loss_fn trains what is not {name}'s ({len(others)} tensors, of shapes "
                f"{shapes}), and only this rank would: make it an nn.Module that has them as parameters when "
                "the runtime is made, whose gradients all ranks of one pipeline share, or freeze them with "
                "requires_grad_(False); beside replicas, let them be the model's"
            )


def _copy(values: Any) -> Any:
    """The same with tensors in another place in memory, which have no gradients."""
    return mapped(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, values)


def _with_gradient(value: Any) -> Any:
    """The same tensor, which gathers gradients where it can."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point() or value.is_complex())


def _ends(outputs: Iterable[Any]) -> set[Node]:
    """Where a graph that begins with these outputs goes on into the model."""
    tensors = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
    # what is written into a view goes on from what it is a view of
    tensors += [x._base for x in tensors if x._base is not None]
    return {get_gradient_edge(x).node for x in tensors if x.requires_grad}


def _gradients(nodes: Iterable[Node]) -> list[tuple[int, int]]:
    """Which gradients the leaves of these have now, and how often each was written to."""
    gradients = [leaf.grad for leaf in leaves_of(nodes, ())]
    return [(0, 0) if grad is None else (id(grad), grad._version) for grad in gradients]


def _left(names: Sequence[str], model: str) -> str:
    what = ", ".join(dict.fromkeys(names)) or "what a forward computes beside its output"
    return (
        f"loss_fn takes {what} of {model}, which a stage sets for each microbatch, on its own rank: return "
        "it from forward, and take it from the output"
    )


def _told(loss: Any) -> str:
    if not isinstance(loss, Tensor):
        return f"type {type(loss).__name__}"
    return f"shape {tuple(loss.shape)}" if loss.ndim else str(loss.dtype)
