"""The loss of a microbatch, and a look at whether microbatches' losses weigh up to that of the full batch.

How much each microbatch weighs is left to ``weights``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from ...errors import AutopipeError, InputError, StepError
from ...stages import own_loss
from ...tracing.inputs.structure import flatten, unflatten
from ...tracing.sizes.other_masks import LEFT_OUT
from ..data.call_kinds import Kinds
from ..data.outputs import weighted
from ..options import Options, is_due
from .left_behind import leaves_of, made_before, newest, reads_noted
from .worker import StepInputs

__all__ = ["Loss"]

_logger = logging.getLogger(__name__)

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_TOLERANCE = 3e-2
KEPT_BYTES = 1 << 24
"""Outputs of all microbatches are kept to be asked about together where they take no more than this."""
_MOST_LABELS = 64
"""How many labels are tried for the one that does not count."""
_MOST_CUTS = 8
"""So many ways to cut a batch in rows are asked about when they are met."""


class Loss:
    """What a runtime trains on: the user's ``loss_fn(output, target)``, or the loss in the model's output.

    A ``loss_fn`` is any Python, so what it averages over cannot be read. Unless ``loss_weight`` says it, it
    is asked at steps 0, 1, 2, 4, 8 and so on, and where a batch is cut otherwise than before, for the loss of
    all microbatches together. Of large outputs for that of the first two and, where these have other rows, of
    the last two. A warning says when that is not what their own losses weigh up to, or when it leaves other
    buffers or another answer than one call of all would: then the full batch's differs.

    Attributes
    ----------
    trains: the parameters, by id, that it may train beside the model's, since all ranks share their
        gradients; None where it may train any. Others are refused at those steps: ranks that make the same
        optimizer would have no gradient of them.
    away: ids of the parameters that other ranks alone have. What layers of theirs set in a forward is
        refused at those steps, and what any stage has left that is not of the microbatch.
    gathers: whether it takes the outputs of the step's microbatches all at once, by :meth:`of_batch`.
    """

    def __init__(self, kinds: Kinds, options: Options, device: torch.device) -> None:
        self._device = device
        self.trains: set[int] | None = None
        self.away: set[int] = set()
        self.gathers = False
        self._takes_batch = options.loss_on == "batch"
        self._kinds, self._loss_fn = kinds, options.loss_fn
        self._kind = kinds[0]
        self._target_axis = (options.batch_dims or {}).get("target", 0) or 0
        is_told = options.loss_weight is not None or options.loss_on is not None
        self._asks = options.loss_fn is not None and not is_told
        self._seen: dict[int, tuple[tuple[Any, ...], Tensor]] = {}
        self._held: dict[int, dict[str, Tensor]] = {}
        self._spans: list[tuple[int, int]] = []
        self._taken: StepInputs | None = None
        self._step: StepInputs | None = None
        self._rows: tuple[int, ...] = ()
        self._cuts: set[tuple[int, ...]] = set()
        self._n_steps = 0
        self._looks = False

    def begin(self, step: StepInputs) -> None:
        """Take up a step."""
        self._rows, self._kind = step.batch.rows, self._kinds[step.batch.kind]
        self._taken = step
        self.gathers = self._takes_batch and step.want_loss and step.batch.n_microbatches > 1
        can_ask = self._asks and step.grad and step.batch.n_microbatches > 1
        # each look waits for the device, so there it ends with the warm-up
        is_due_now = is_due(self._n_steps) and (self._n_steps < 2 or self._device.type == "cpu")
        is_due_now |= self._rows not in self._cuts and len(self._cuts) < _MOST_CUTS
        self._step = step if can_ask and is_due_now else None
        if self._step is not None:
            self._cuts.add(self._rows)
        self._looks = self._loss_fn is not None and step.grad and is_due(self._n_steps)
        self._n_steps += step.grad
        self._seen, self._held = {}, {}

    def end(self) -> None:
        """Drop what belongs to a step, wherever that ended."""
        self._taken = self._step = None
        self._seen, self._held = {}, {}

    def __call__(self, outputs: Sequence[Any], target: Any, m: int) -> Tensor:
        """The loss of microbatch ``m``. Raises :class:`InputError` where there is none to train on."""
        if self._step is not None:
            self._get_ready(outputs, m)
        loss = self._checked(outputs, target, m)
        if self._step is not None:
            self._keep(self._step, outputs, loss, m)
        return loss

    def of_batch(self, parts: Sequence[Sequence[Any]]) -> Tensor:
        """The loss of all microbatches, whose outputs' leaves are ``parts``, in one call.

        Raises :class:`InputError` where there is none to train on, or those do not make the batch's outputs.
        """
        assert self._taken is not None
        batch, kind = self._taken.batch, self._kind
        kind.outputs.check(batch)
        weights = kind.weigher.beside(batch) or kind.weigher.in_outputs(batch, self._taken.weights)
        joined = kind.outputs.join(parts, batch, weights, for_loss=True)
        return self._checked(joined, batch.as_one(self._device).targets[0], None)

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

    def _get_ready(self, outputs: Iterable[Any], m: int) -> None:
        """Choose what to ask for together, and keep what ``loss_fn`` holds ahead of the first of these."""
        if m == 0:
            n = len(self._rows)
            n_bytes = sum(x.numel() * x.itemsize for x in outputs if isinstance(x, Tensor))
            pairs = [(0, 2), (n - 2, n)] if self._rows[-1] not in self._rows[:2] else [(0, 2)]
            self._spans = [(0, n)] if n * n_bytes <= KEPT_BYTES else pairs
        if any(m == first for first, _ in self._spans):
            self._held[m] = {name: b.detach().clone() for name, b in _buffers(self._loss_fn).items()}

    def _keep(self, step: StepInputs, outputs: Iterable[Any], loss: Tensor, m: int) -> None:
        """Keep what is asked for together, and ask once all of it is there."""
        if any(m in range(*span) for span in self._spans):
            self._seen[m] = tuple(x.detach() if isinstance(x, Tensor) else x for x in outputs), loss.detach()
        for span in [s for s in self._spans if all(i in self._seen for i in range(*s))]:
            self._spans.remove(span)
            self._ask(step, *span)

    def _made(self, loss_fn: Callable[[Any, Any], Tensor], output: Any, target: Any, m: int | None) -> Tensor:
        """What it gives. Raises :class:`InputError` where it fails without a target, tells of one row."""
        try:
            return loss_fn(output, target)
        except AutopipeError:
            raise
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            if target is None:
                raise InputError(
                    f"the step was given no target, and loss_fn failed with None ({told}); pass one, as in "
                    "rt.step(x, target=y), or give a loss_fn that does without"
                ) from error
            if m is None or self._rows[m] > 1 or len(self._rows) == 1:
                raise
            raise StepError(
                f"loss_fn failed on microbatch {m}, which is a single row of the batch's {sum(self._rows)} "
                f"({told}); where it drops the axis of rows, as squeeze() does, name the axis, as in "
                f"squeeze(-1), or pass n_microbatches={max(1, sum(self._rows) // 2)}"
            ) from error

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

    @torch.no_grad()
    def _ask(self, step: StepInputs, start: int, stop: int) -> None:
        """Warn where the loss of some microbatches together is not what their losses weigh up to."""
        batch, weights = step.batch.part(start, stop), step.weights[start:stop]
        outputs, losses = zip(*(self._seen[m] for m in range(start, stop)), strict=True)
        total = float(sum(weights))
        if not total:
            return
        capture, weigher, joins = self._kind.capture, self._kind.weigher, self._kind.outputs
        weighed = weighted(losses, weights).item() / (1.0 if weigher.is_sum else total)
        if not math.isfinite(weighed):
            return
        held, left = self._held[start], _buffers(self._loss_fn)
        try:
            joins.check(batch)
            # a loss of the model's own is of both together what its labels make it, whatever weighs them here
            parts = (weigher.beside(step.batch) or step.weights)[start:stop]
            shares = weights if weigher.is_sum else [w / sum(parts) for w in parts]
            joined = capture.assemble(joins.join(outputs, batch, shares))
            found, others = self._asked_again(held, joined, _joined(batch.targets, self._target_axis))
            before = torch.get_rng_state()
            again, _ = self._asked_again(held, capture.assemble(outputs[0]), batch.targets[0])
            is_drawn = not torch.equal(before, torch.get_rng_state()) or self._device.type != "cpu"
        except InputError as error:
            self._warn(f"it gets an output that is not the full batch's: {error}")
            return
        except Exception:
            # any Python: it may count calls, or want the sizes of one microbatch
            _logger.debug("loss_fn does not take several microbatches together", exc_info=True)
            return
        tolerance = _tolerance(losses[0].dtype, outputs[0])
        is_close = functools.partial(math.isclose, rel_tol=tolerance, abs_tol=tolerance)
        first = losses[0].item()  # not a number where none of its labels count
        is_other = not (is_close(again, first) or (math.isnan(again) and math.isnan(first)))
        if math.isfinite(found) and not is_close(found, weighed) and not is_other:
            which = "all" if stop - start == len(self._rows) else f"microbatches {start} and {stop - 1}"
            label = _left_out(batch.targets, losses, lambda mean: is_close(found, mean))
            self._warn(f"it gives {found:.6g} for {which} together, which weigh up to {weighed:.6g}", label)
        elif is_other and not is_drawn:
            self._warn(f"it gives {again:.6g} where it gave {first:.6g} before for the same")
        elif name := next((n for n, b in others.items() if not _are_close(b, left[n], tolerance)), ""):
            self._warn(f"one call of all leaves its buffer {name} otherwise than a call for each")

    def _asked_again(
        self, held: Mapping[str, Tensor], output: Any, target: Any
    ) -> tuple[float, Mapping[str, Tensor]]:
        """The loss where ``loss_fn`` has these buffers, which it may write to, and they after it."""
        assert self._loss_fn is not None
        with _lent(self._loss_fn, held):
            return self._loss_fn(output, target).item(), _buffers(self._loss_fn)

    def _warn(self, why: str, label: int = LEFT_OUT) -> None:
        """``label`` is what marks those that do not count."""
        self._asks = False
        _logger.warning(
            "the loss of the full batch is not the weighted sum of loss_fn's losses of its microbatches: %s; "
            "gradients differ from the full batch's as much. Pass loss_weight=lambda args, kwargs, target: "
            "(target != %d).sum() for a mean over labels that count, no loss_fn for the loss that the "
            "model makes, loss_reduction='sum' for a sum, or loss_on='batch' for one that compares rows or "
            "keeps something from call to call, which is then called once on the whole batch",
            why,
            label,
        )


def _tolerance(dtype: torch.dtype, outputs: Iterable[Any]) -> float:
    """How far losses of this dtype may be apart by rounding: no less than what they are made of has."""
    floats = {x.dtype for x in outputs if isinstance(x, Tensor) and x.is_floating_point()}
    if dtype is torch.float64 and floats - {torch.float64}:
        dtype = torch.float32
    return _TOLERANCES.get(dtype, _HALF_TOLERANCE)


def _left_out(targets: Sequence[Any], losses: Sequence[Tensor], is_it: Callable[[float], bool]) -> int:
    """The label without which microbatches weigh up to what they are together; torch's own if none is."""
    labels = [t for t in targets if isinstance(t, Tensor) and t.dtype is torch.int64]
    if len(labels) == len(losses):
        for label in torch.cat([t.flatten() for t in labels]).unique()[:_MOST_LABELS].tolist():
            weights = [(t != label).sum() for t in labels]
            if is_it((weighted(losses, weights) / sum(weights)).item()):
                return int(label)
    return LEFT_OUT


def _joined(targets: Sequence[Any], axis: int) -> Any:
    leaves, specs = zip(*map(flatten, targets), strict=True)
    each = zip(*leaves, strict=True)
    return unflatten(specs[0], [a[0] if all(x is a[0] for x in a) else torch.cat(a, axis) for a in each])


def _buffers(loss_fn: Any) -> dict[str, Tensor]:
    """What a loss that is a module keeps from call to call."""
    return dict(loss_fn.named_buffers()) if isinstance(loss_fn, nn.Module) else {}


@contextlib.contextmanager
def _lent(loss_fn: Any, held: Mapping[str, Tensor]) -> Iterator[None]:
    """Within it a loss that is a module has copies of these buffers, which it may write to."""
    kept = {}
    for name, value in held.items():
        path, _, last = name.rpartition(".")
        owner = loss_fn.get_submodule(path)._buffers
        kept[name] = owner, last, owner[last]
        owner[last] = value.clone()
    try:
        yield
    finally:
        for owner, last, value in kept.values():
            owner[last] = value


def _are_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), tolerance, tolerance, equal_nan=True)


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
