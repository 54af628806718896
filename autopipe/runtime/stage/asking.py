"""Whether a ``loss_fn`` of a batch is what its losses of microbatches weigh up to: it is asked, and put back.

When it is asked is left to ``choice``, what follows from the answer to ``loss``, what it keeps to ``held``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fractions
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...tracing.calls.labels import FUNCTIONS
from ...tracing.inputs.structure import flatten, mapped, unflatten
from ...tracing.sizes.other_masks import LEFT_OUT
from ..data.microbatch import Cut
from ..data.outputs import weighted
from .held import Held

__all__ = ["Parts", "Question", "Subject", "Verdict", "joined_targets", "left_out", "spread"]

_logger = logging.getLogger(__name__)

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_TOLERANCE = 3e-2
_OF_GRADIENTS = 10
"""How many times as far apart as losses gradients may be: fewer numbers make each."""
_LEAST_GRADIENT = 1e-2
"""Gradients are held against no less than this over the number of outputs, as those of a mean are about."""
_MOST_LABELS = 64
"""How many labels are tried for the one that does not count."""
_OF_A_HINT = 1e-4
_IGNORED = 4
"""The place of ``ignore_index`` among arguments."""

Parts = Sequence[Sequence[Any]]
"""The leaves of the outputs of some microbatches."""
Grads = list[list[Tensor | None]]
"""Theirs."""


@dataclasses.dataclass
class Subject:
    """Microbatches that are asked about together, and what is kept of them until each has its loss.

    ``held`` is what the loss kept ahead of the first, None where that cannot be told; ``takes_items`` says
    that it takes some from an iterator, which nothing puts back. ``target`` is that of all, where they are
    the batch; ``outputs``, ``targets`` and ``losses`` are those of each.
    """

    span: range
    held: Held | None = None
    takes_items: bool = False
    target: Any = None
    outputs: dict[int, Sequence[Any]] = dataclasses.field(default_factory=dict)
    targets: dict[int, Any] = dataclasses.field(default_factory=dict)
    losses: dict[int, Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Answer:
    """The losses of several calls, their gradients by output, and the buffers and counts that they left."""

    losses: Sequence[Tensor]
    grads: Grads
    buffers: Mapping[str, Tensor]
    counts: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a loss was found to do with a batch.

    ``loss`` is the batch's own in one call; ``why`` says in words how microbatches' differ, empty where they
    do not. ``is_told``: whether that could be told. ``marks``: the labels that it may leave out, as far as
    torch is told them. ``is_idle``: whether all gradients were 0, as a margin's that nothing exceeds, which
    tells nothing of others.
    """

    loss: Tensor
    why: str
    is_told: bool = True
    losses: Sequence[Tensor] = ()
    marks: Collection[int] = ()
    is_idle: bool = False


@dataclasses.dataclass(frozen=True)
class Question:
    """Asks about some microbatches.

    Attributes
    ----------
    call: the loss of flat outputs and a target. join: makes flat outputs of those of microbatches.
    parts: outputs of each, whose leaves gather gradients. weights: what each weighs in a loss of all.
    targets, target: of each, and of all. held: what the loss kept ahead of the first.
    """

    call: Callable[[Sequence[Any], Any], Tensor]
    join: Callable[[Parts], Sequence[Any]]
    parts: Parts
    weights: Sequence[float | Tensor]
    targets: Sequence[Any]
    target: Any
    held: Held

    def ask(
        self,
        given: Sequence[Tensor | None],
        cut: Cut | None,
        make: Callable[[Sequence[Any], Any], Tensor],
    ) -> Verdict:
        """Ask. The loss is left as after one call for all, by ``make``, which may raise anything.

        ``given`` are the losses of each as they were made. By the ``cut`` of the batch, if that is given, the
        same is asked of targets in other places.
        """
        each = None
        with _let_be("loss_fn does not take a microbatch"):
            each = self._each(self.parts, self.targets)
        drew, why, labels = self.held.has_drawn, "", _LabelsAskedFor()
        again = None
        with _let_be("loss_fn could not be asked for the first again"), labels:
            again = None if each is None or drew else self._called(self.parts[0], self.targets[0]).detach()
        with _let_be("loss_fn could not be asked about other data"):
            if each is not None and not drew and cut is not None:
                why = self._is_apart_elsewhere(cut)
        self.held.put_back()
        loss = make(self.join(self.parts), mapped(_copied, self.target))
        one = self._answer([loss], _gradients(loss, self.parts))
        if each is None:
            return Verdict(loss, "it does not take each of them")
        if drew:
            return Verdict(loss, "it draws random numbers, once for all rows")
        first = each.losses[0].item()
        if any(
            g is not None and not _are_close(g, x, self._tolerance)
            for g, x in zip(given, each.losses, strict=True)
        ):
            return Verdict(loss, self._apart(one, each), is_told=False)
        if again is not None and not _are_close(again, each.losses[0], self._tolerance):
            return Verdict(loss, f"it gives {again.item():.6g} where it gave {first:.6g} before for the same")
        why = self._apart(one, each) or why
        return Verdict(loss, why, losses=each.losses, marks=labels.found, is_idle=_are_zero(each.grads))

    @property
    def _tolerance(self) -> float:
        """How far losses may be apart by rounding: no less than what they are made of has."""
        floats = [
            x.dtype for part in self.parts for x in part if isinstance(x, Tensor) and x.is_floating_point()
        ]
        return max((_TOLERANCES.get(d, _HALF_TOLERANCE) for d in floats), default=_HALF_TOLERANCE)

    def _each(self, parts: Parts, targets: Sequence[Any]) -> _Answer:
        """What it gives for each microbatch, one after another."""
        self.held.put_back()
        losses: list[Tensor] = []
        grads: Grads = []
        for part, target in zip(_leaves(parts), targets, strict=True):
            losses.append(self._called(part, target))
            grads += _gradients(losses[-1], [part])
        return self._answer(losses, grads)

    def _called(self, outputs: Sequence[Any], target: Any) -> Tensor:
        """The loss of copies, which it may write to."""
        return self.call([*map(_copied, outputs)], mapped(_copied, target))

    def _answer(self, losses: Sequence[Tensor], grads: Grads) -> _Answer:
        return _Answer([x.detach() for x in losses], grads, self.held.buffers(), self.held.counts())

    def _together(self, parts: Parts, target: Any) -> _Answer:
        """What one call gives for all of them."""
        self.held.put_back()
        leaves = _leaves(parts)
        loss = self._called(self.join(leaves), target)
        return self._answer([loss], _gradients(loss, leaves))

    def _is_apart_elsewhere(self, cut: Cut) -> str:
        """The same of targets that are of other rows, and half of those of the first microbatch zero.

        Whole numbers on an accelerator are not made zero: what they point to is not asked about there.
        """
        first = cut.sizes[0]

        def other(rows: Tensor, axis: int) -> Tensor:
            rolled = rows.detach().roll(1, axis)
            if not (rolled.is_cpu or rolled.is_floating_point() or rolled.dtype is torch.bool):
                return rolled
            own = rolled.narrow(axis, 0, first).clone(memory_format=torch.contiguous_format)
            own.view(-1)[: max(1, own.numel() // 2)] = 0
            return torch.cat([own, rolled.narrow(axis, first, cut.n_rows - first)], axis)

        target = _changed(self.target, cut, other)
        if target is None:
            return ""
        one, each = self._together(self.parts, target), self._each(self.parts, cut.of({}, target).targets)
        why = self._apart(one, each)
        return why and f"with labels in other places {why}"

    def _apart(self, one: _Answer, each: _Answer) -> str:
        """In words, how one call for all differs from what those for each weigh up to; else empty."""
        found, sum_of_each = one.losses[0].item(), weighted(each.losses, self.weights).item()
        if not math.isfinite(found):
            return ""
        tolerance = max(self._tolerance, _TOLERANCES.get(one.losses[0].dtype, _HALF_TOLERANCE))
        if not math.isclose(found, sum_of_each, rel_tol=tolerance, abs_tol=tolerance):
            return f"it gives {found:.6g} for all together, which weigh up to {sum_of_each:.6g}"
        told = zip(each.grads, self.weights, strict=True)
        # of weight 0 are means of nothing, whose gradients are no numbers
        wanted = [[None if g is None or not w else g * w for g in grads] for grads, w in told]
        if _differ(one.grads, wanted, _OF_GRADIENTS * tolerance):
            return f"it gives {found:.6g} for all together, but not the gradients of each"
        for name, b in one.buffers.items():
            if name in each.buffers and not _are_close(b, each.buffers[name], tolerance):
                return f"one call of all leaves its buffer {name} otherwise than a call for each"
        for name, n in one.counts.items():
            if (other := each.counts.get(name, n)) != n:
                return f"one call of all leaves {name} at {n}, a call for each at {other}"
        return ""


class _LabelsAskedFor(TorchFunctionMode):
    """Notes which labels calls leave out, or compare others with."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in FUNCTIONS:
            self.found.add(kwargs.get("ignore_index", args[_IGNORED] if len(args) > _IGNORED else LEFT_OUT))
        elif getattr(function, "__name__", "").strip("_") in ("eq", "ne"):
            self.found.update(x for x in args[1:2] if type(x) is int)
        return function(*args, **kwargs)


@contextlib.contextmanager
def _let_be(what: str) -> Iterator[None]:
    """Within it a loss, which is any Python, may fail."""
    try:
        yield
    except Exception:
        _logger.debug(what, exc_info=True)


def _leaves(parts: Parts) -> list[list[Any]]:
    """The same tensors, that gather gradients of their own where these do."""
    return [
        [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in part]
        for part in parts
    ]


def _copied(value: Any) -> Any:
    """The same in another place in memory, with the same gradients."""
    return value.clone() if isinstance(value, Tensor) else value


def _gradients(loss: Tensor, parts: Parts) -> Grads:
    """Those of a loss, by the leaves of parts, which keeps its graph."""
    takes = [x for part in parts for x in part if isinstance(x, Tensor) and x.requires_grad]
    if not takes or not loss.requires_grad:
        return [[None] * len(part) for part in parts]
    found = iter(torch.autograd.grad(loss, takes, retain_graph=True, allow_unused=True))
    return [
        [next(found) if isinstance(x, Tensor) and x.requires_grad else None for x in part] for part in parts
    ]


def _are_zero(gradients: Grads) -> bool:
    """Whether there are some, all of them 0."""
    there = [g for grads in gradients for g in grads if g is not None]
    return bool(there) and not any(bool(g.any()) for g in there)


def _differ(ones: Grads, others: Grads, tolerance: float) -> bool:
    """Whether gradients are apart by more than rounding makes them."""
    pairs = [(a, b) for one, other in zip(ones, others, strict=True) for a, b in zip(one, other, strict=True)]
    there = [(a, b) for a, b in pairs if a is not None or b is not None]
    if not there:
        return False
    both = [(_or_zeros(a, b), _or_zeros(b, a)) for a, b in there]
    each = [(a.abs().max(), b.abs().max(), (a - b).abs().max()) for a, b in both if a.numel()]
    a, b, apart = (
        torch.stack([x.double().cpu() for x in column]).max().item() for column in zip(*each, strict=True)
    )
    least = _LEAST_GRADIENT / sum(x.numel() for x, _ in both)
    return not apart <= tolerance * max(a, b, least)


def _or_zeros(gradient: Tensor | None, other: Tensor | None) -> Tensor:
    """A gradient, which is zero where there is none beside another."""
    if gradient is not None:
        return gradient
    assert other is not None
    return torch.zeros_like(other)


def _are_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), tolerance, tolerance, equal_nan=True)


def joined_targets(targets: Sequence[Any], axis: int) -> Any:
    """The target of some microbatches together."""
    leaves, specs = zip(*map(flatten, targets), strict=True)
    each = zip(*leaves, strict=True)
    return unflatten(specs[0], [a[0] if all(x is a[0] for x in a) else torch.cat(a, axis) for a in each])


def _changed(target: Any, cut: Cut, change: Callable[[Tensor, int], Tensor]) -> Any:
    """The target with other tensors for those that have rows to be cut; None where there is none."""
    axis, (leaves, spec) = cut.target_axis, flatten(target)
    if axis is None:
        return None
    are_cut = [
        isinstance(x, Tensor) and x.ndim > axis and x.shape[axis] == cut.n_rows and i not in cut.whole
        for i, x in enumerate(leaves)
    ]
    if not any(are_cut):
        return None
    told = zip(leaves, are_cut, strict=True)
    return unflatten(spec, [change(x, axis) if is_cut else x for x, is_cut in told])


def spread(targets: Sequence[Any], marks: Collection[int]) -> set[int]:
    """Those of some labels of which a microbatch has a larger share than another; of labels on the host."""
    found = set()
    for pieces in zip(*(flatten(target)[0] for target in targets), strict=True):
        if all(isinstance(x, Tensor) and x.dtype is torch.int64 and x.is_cpu and x.numel() for x in pieces):
            for mark in marks:
                shares = {fractions.Fraction(int((x == mark).sum()), x.numel()) for x in pieces}
                found |= {mark} if len(shares) > 1 else set()
    return found


def left_out(targets: Sequence[Any], losses: Sequence[Tensor], loss: float) -> int:
    """The label without which microbatches' losses weigh up to that of all; torch's own if there is none."""
    labels = [t for t in targets if isinstance(t, Tensor) and t.dtype is torch.int64]
    if labels and len(labels) == len(losses):
        for label in torch.cat([t.flatten() for t in labels]).unique()[:_MOST_LABELS].tolist():
            weights = [(t != label).sum() for t in labels]
            total = weighted(losses, weights)
            if math.isclose(total / sum(weights).to(total.device), loss, rel_tol=_OF_A_HINT):
                return int(label)
    return LEFT_OUT
