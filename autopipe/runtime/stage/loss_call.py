"""One call of a loss: the user's ``loss_fn``, or the loss in the model's output; and what it may not do.

On which outputs it is called is left to ``loss``, what forwards leave beside outputs to ``left_behind``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from ...errors import AutopipeError, InputError, StepError
from ...stages import own_loss
from ...torch_private import newest
from ..data.call_kinds import Kinds
from ..options import is_due
from .left_behind import leaves_of, made_before, reads_noted
from .worker import StepInputs

__all__ = ["LossCall"]

_BY_SHAPE = (RuntimeError, ValueError, IndexError, AssertionError)
"""Errors that tensors of other shapes end in."""
_NOT_USED = "appears to not have been used in the graph"
"""What torch says of a tensor that a gradient is asked by and that nothing leads to."""


class LossCall:
    """Calls a loss; now and then it looks at what that reads and trains, and refuses what no stage has.

    Attributes
    ----------
    trains: the parameters, by id, that it may train beside the model's, since all ranks share their
        gradients; None where it may train any. Others are refused at those steps: ranks that make the same
        optimizer would have no gradient of them.
    away: ids of the parameters that other ranks alone have. What layers of theirs set in a forward is
        refused at those steps, and what any stage has left that is not of the microbatch.
    looks: whether the next call is looked at.
    failure: what the last call ended in, if it was an error of the user's code.
    """

    def __init__(self, kinds: Kinds, loss_fn: Callable[[Any, Any], Tensor] | None) -> None:
        self.trains: set[int] | None = None
        self.away: set[int] = set()
        self.failure: Exception | None = None
        self._kinds, self._loss_fn, self._kind = kinds, loss_fn, kinds[0]
        self._rows: tuple[int, ...] = ()
        self._n_flat, self._trains = 0, True
        self._n_steps, self.looks = 0, False

    def begin(self, step: StepInputs) -> None:
        """Take up a step."""
        self._rows, self._kind, self.failure = step.batch.rows, self._kinds[step.batch.kind], None
        self._n_flat, self._trains = 0, step.grad
        self.looks = self._loss_fn is not None and step.grad and is_due(self._n_steps)
        self._n_steps += step.grad

    def __call__(self, outputs: Sequence[Any], target: Any, m: int | None = None) -> Tensor:
        """The loss of flat outputs, of microbatch ``m`` or of all.

        Raises :class:`InputError` for one that no step can train on.
        """
        capture, loss_fn = self._kind.capture, self._loss_fn
        output = capture.assemble(outputs)
        looks = self.looks and torch.is_grad_enabled()
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
            self.failure = InputError(
                f"a step needs a real scalar loss, but {source}; pass loss_fn=lambda output, target: … that "
                "returns a 0-d tensor to runtime()"
            )
            raise self.failure
        if self._trains and torch.is_grad_enabled() and not loss.requires_grad and self._is_flat(m):
            self.failure = InputError(
                "the loss does not require a gradient: loss_fn does not use the output, or every parameter "
                "it depends on is frozen; let one train, or take the loss alone with evaluate()"
            )
            raise self.failure
        if looks:
            self.looks = False
            if self.trains is not None and loss.requires_grad:
                self._refuse_others(loss, ends)
        return loss

    def _is_flat(self, m: int | None) -> bool:
        """Whether none requires a gradient, now that one does not, as of rows of which nothing is made."""
        self._n_flat += 1
        return m is None or self._n_flat == len(self._rows)

    def _made(self, loss_fn: Callable[[Any, Any], Tensor], output: Any, target: Any, m: int | None) -> Tensor:
        """What it gives. Raises :class:`InputError` where it fails without a target, tells of one row."""
        try:
            return loss_fn(output, target)
        except AutopipeError:
            raise
        except Exception as error:
            self.failure = self._explained(error, target, m)
            if self.failure is error:
                raise
            raise self.failure from error

    def _explained(self, error: Exception, target: Any, m: int | None) -> Exception:
        """What to raise where ``loss_fn`` fails."""
        told = f"{type(error).__name__}: {error}"
        if isinstance(error, TypeError) and (misfit := _misfit(self._loss_fn)):
            return InputError(f"{misfit} ({told})")
        if target is None:
            return InputError(
                f"the step was given no target, and loss_fn failed with None ({told}); pass one, as in "
                "rt.step(x, target=y), or give a loss_fn that does without"
            )
        if _NOT_USED in told:
            return InputError(
                f"loss_fn takes gradients by what its output does not lead to ({told}): to weights of "
                "earlier stages it never does, to none where it is the whole batch's; take them by the "
                "output, as in torch.autograd.grad(loss, output, create_graph=True), or by weights of the "
                "last stage alone under loss_on='microbatches'"
            )
        if m is None or self._rows[m] > 1 or len(self._rows) == 1 or not isinstance(error, _BY_SHAPE):
            return error
        return StepError(
            f"loss_fn failed on microbatch {m} ({told}), which is a single row of the batch's "
            f"{sum(self._rows)}; where that is why, as it drops the axis of rows with squeeze(), name the "
            f"axis, as in squeeze(-1), or pass n_microbatches={max(1, sum(self._rows) // 2)}"
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


def _misfit(loss_fn: Any) -> str:
    """How a function that is no loss of two arguments is to be, or nothing."""
    try:
        takes = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # some of C's do not tell
        return ""
    try:
        takes.bind(None, None)
    except TypeError:
        return f"loss_fn takes {takes}, and is called with (output, target); give one that takes these two"
    return ""


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
