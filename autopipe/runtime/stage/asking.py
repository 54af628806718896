"""Whether a ``loss_fn`` of a batch is what its losses of microbatches weigh up to: it is asked, and put back.

When it is asked, and what follows from the answer, is left to ``loss``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ... import accelerator
from ...tracing.inputs.structure import flatten, unflatten
from ...tracing.sizes.other_masks import LEFT_OUT
from ...tracing.state.state import Snapshot, generators
from ..data.microbatch import Cut
from ..data.outputs import weighted

__all__ = ["Held", "Parts", "Question", "Verdict", "joined_targets", "left_out"]

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
_LESS = 0.9
"""What other rows are multiplied by, to see whether the gradients of some go by them."""

Parts = Sequence[Sequence[Any]]
"""The leaves of the outputs of some microbatches."""
Grads = list[list[Tensor | None]]
"""Theirs."""


class Held:
    """What a ``loss_fn`` keeps from call to call, and the generators that it may draw from, at one moment."""

    def __init__(self, loss_fn: Any, device: torch.device) -> None:
        self._of, self._device = loss_fn, device
        self._snapshot = Snapshot(_Holder(loss_fn))
        own = accelerator.default_generator(device)
        there = {id(g): g for g in (torch.default_generator, own) if g is not None}
        self._draws = [(g, g.get_state()) for g in there.values()]
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._state = generators(device)

    def put_back(self) -> None:
        """Let it keep what it did, and draw what it would have."""
        self._snapshot.restore()
        for generator, state in self._draws:
            generator.set_state(state)
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    @property
    def has_drawn(self) -> bool:
        """Whether a generator has moved since."""
        return generators(self._device) != self._state

    def buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers that it has now."""
        named = self._of.named_buffers() if isinstance(self._of, nn.Module) else ()
        return {name: b.detach().clone() for name, b in named}


class _Holder(nn.Module):
    """Has a ``loss_fn`` of any kind as an attribute, as a model has what its code reaches."""

    def __init__(self, loss_fn: Any) -> None:
        super().__init__()
        self.loss_fn = loss_fn


@dataclasses.dataclass(frozen=True)
class _Answer:
    """The losses of several calls, their gradients by output, and the buffers that they left."""

    losses: Sequence[Tensor]
    grads: Grads
    buffers: Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a loss was found to do with a batch.

    ``loss`` is the batch's own in one call; ``why`` says in words how microbatches' differ, empty where they
    do not. ``is_told``: whether that could be told.
    """

    loss: Tensor
    why: str
    is_told: bool = True
    losses: Sequence[Tensor] = ()


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
        drew, why = self.held.has_drawn, ""
        again = None if each is None or drew else self._again()
        with _let_be("loss_fn could not be asked about other data"):
            if each is not None and drew:
                why = self._goes_by_others(cut)
            elif each is not None and cut is not None:
                why = self._is_apart_elsewhere(cut)
        self.held.put_back()
        loss = make(self.join(self.parts), self.target)
        one = _Answer([loss.detach()], _gradients(loss, self.parts), self.held.buffers())
        if each is None:
            return Verdict(loss, "it does not take each of them")
        if drew:
            return Verdict(loss, why)
        first = each.losses[0].item()
        if any(
            g is not None and not _is_close(g, x, self._tolerance)
            for g, x in zip(given, each.losses, strict=True)
        ):
            return Verdict(loss, self._apart(one, each), is_told=False)
        if again is not None and not _is_close(again, each.losses[0], self._tolerance):
            return Verdict(loss, f"it gives {again.item():.6g} where it gave {first:.6g} before for the same")
        return Verdict(loss, self._apart(one, each) or why, losses=each.losses)

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
            losses.append(self.call(part, target))
            grads += _gradients(losses[-1], [part])
        return _Answer([x.detach() for x in losses], grads, self.held.buffers())

    def _again(self) -> Tensor:
        """What it gives for the first once more, as all have left it."""
        with torch.no_grad():
            return self.call(self.parts[0], self.targets[0]).detach()

    def _together(self, parts: Parts, target: Any) -> _Answer:
        """What one call gives for all of them."""
        self.held.put_back()
        leaves = _leaves(parts)
        loss = self.call(self.join(leaves), target)
        return _Answer([loss.detach()], _gradients(loss, leaves), self.held.buffers())

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
            own.view(-1)[: own.numel() // 2] = 0
            return torch.cat([own, rolled.narrow(axis, first, cut.n_rows - first)], axis)

        target = _changed(self.target, cut, other)
        if target is None:
            return ""
        one, each = self._together(self.parts, target), self._each(self.parts, cut.of({}, target).targets)
        why = self._apart(one, each)
        return why and f"with labels in other places {why}"

    def _goes_by_others(self, cut: Cut | None) -> str:
        """The same of a loss that draws, which is to draw the same for all: whether rows go by other rows."""
        parts, target = [self.parts[0], *([_less(x) for x in part] for part in self.parts[1:])], self.target
        if cut is not None:
            first = cut.sizes[0]

            def other(rows: Tensor, axis: int) -> Tensor:
                own, rest = rows.detach().split([first, cut.n_rows - first], axis)
                is_less = rest.is_floating_point() or rest.is_complex()
                return torch.cat([own, rest * _LESS if is_less else rest.flip(axis)], axis)

            target = _changed(self.target, cut, other)
        one = self._together(self.parts, self.target)
        other_one = self._together(parts, self.target if target is None else target)
        is_other = _differ(one.grads[:1], other_one.grads[:1], _OF_GRADIENTS * self._tolerance)
        return "its gradients of a row go by other rows" if is_other else ""

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
        return ""


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


def _less(value: Any) -> Any:
    """The same tensor, of lesser numbers."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return (value.detach() * _LESS).requires_grad_(value.requires_grad)


def _gradients(loss: Tensor, parts: Parts) -> Grads:
    """Those of a loss, by the leaves of parts, which keeps its graph."""
    takes = [x for part in parts for x in part if isinstance(x, Tensor) and x.requires_grad]
    if not takes or not loss.requires_grad:
        return [[None] * len(part) for part in parts]
    found = iter(torch.autograd.grad(loss, takes, retain_graph=True, allow_unused=True))
    return [
        [next(found) if isinstance(x, Tensor) and x.requires_grad else None for x in part] for part in parts
    ]


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


def _is_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return _are_close(a.detach(), b.detach(), tolerance)


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


def left_out(targets: Sequence[Any], losses: Sequence[Tensor], loss: float) -> int:
    """The label without which microbatches' losses weigh up to that of all; torch's own if there is none."""
    labels = [t for t in targets if isinstance(t, Tensor) and t.dtype is torch.int64]
    if labels and len(labels) == len(losses):
        for label in torch.cat([t.flatten() for t in labels]).unique()[:_MOST_LABELS].tolist():
            weights = [(t != label).sum() for t in labels]
            if math.isclose(weighted(losses, weights) / sum(weights), loss, rel_tol=_OF_A_HINT):
                return int(label)
    return LEFT_OUT
