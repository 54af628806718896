"""What a step gives back: outputs, and a loss that knows that its gradients have been made.

Making them is left to ``execute.results``. A loop written for plain PyTorch goes on with the loss: it divides
it for accumulation, scales it, adds a penalty, calls ``backward``. None of that reaches gradients that are
there already, so what would have changed them is refused or said; a loss that is looked at is a plain number.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import InputError
from ..torch_private import UnseenByFunctions, pytree

__all__ = ["ELSEWHERE", "StepLoss", "StepResult"]

_logger = logging.getLogger(__name__)

DONE = (
    "step() has made the gradients already: leave backward() out. To weigh or accumulate them, step within "
    "rt.scaled(factor) or call rt.accumulate(batches); a GradScaler is for pipe.runtime(scaler=...), a "
    "further term has a backward of its own; a loss that has a backward is given by "
    "autopipe.neighbours.module.PipelineModule"
)
ELSEWHERE = {
    "train": "call pipe.train()",
    "eval": "call pipe.eval()",
    "zero_grad": "call optimizer.zero_grad()",
    "backward": "rt.step(...) makes the gradients",
    "state_dict": "rt.save(folder) keeps the weights, pipe.merge().state_dict() has them on every rank",
    "load_state_dict": "rt.load(folder) reads weights, of a plain model too",
    "to": "give pipe.runtime(device=...)",
    "generate": "call pipe.generate(...)",
    "merge": "call pipe.merge()",
    "cuda": "give pipe.runtime(device=...)",
    "compile": "call rt.wrap(torch.compile)",
    "verify": "call pipe.verify()",
    "model": "the model is pipe.model",
    "module": "the model is pipe.model",
}
"""What a runtime does not do, and who does."""

_ENDS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_SCALES = {"mul", "rmul", "imul", "div", "truediv", "itruediv", "divide", "true_divide", "multiply"}
_SUMS = {"add", "radd", "iadd", "sub", "rsub", "isub", "neg", "subtract"}


class StepLoss(Tensor):
    """A step's loss, 0-d: arithmetic gives such a loss again, anything else a plain tensor.

    ``backward`` and ``autograd.grad`` raise :class:`InputError`, as a ``GradScaler`` does that the runtime
    was not given: it would divide gradients that nothing multiplied.
    """

    _adds = False
    _is_scaled = False

    @classmethod
    def of(cls, loss: Tensor, *, adds: bool = False, is_scaled: bool = False) -> StepLoss:
        """``adds``: whether the step added to gradients of an earlier one; a division of it is warned of."""
        made = loss.as_subclass(cls)
        made._adds, made._is_scaled = adds, is_scaled
        return made

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Always raises :class:`InputError`."""
        raise InputError(DONE)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _ENDS:
            raise InputError(DONE)
        leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
        losses = [x for x in leaves if isinstance(x, StepLoss)]
        name = getattr(func, "__name__", "").strip("_")
        if name in _SCALES:
            _told(losses, leaves, sys._getframe(1).f_globals.get("__name__", ""))
        with UnseenByFunctions():
            leaves = [x.as_subclass(Tensor) if isinstance(x, StepLoss) else x for x in leaves]
        plain_args, plain_kwargs = pytree.tree_unflatten(leaves, structure)
        result = func(*plain_args, **plain_kwargs)
        if name not in _SCALES | _SUMS or not losses or not isinstance(result, Tensor):
            return result
        return cls.of(result, is_scaled=losses[0]._is_scaled)


def _told(losses: Sequence[StepLoss], operands: Sequence[Any], caller: str) -> None:
    if caller == "torch.amp.grad_scaler" and not all(loss._is_scaled for loss in losses):
        raise InputError(
            "the scaler would divide gradients that the step has not multiplied: give it to the runtime, "
            "pipe.runtime(scaler=scaler), and call scaler.step(optimizer) and scaler.update() alone"
        )
    if any(loss._adds for loss in losses) and any(isinstance(x, (int, float)) for x in operands):
        _logger.warning(
            "dividing a step's loss leaves its gradients as they are, and these were added to those of the "
            "step before: for their mean call rt.accumulate(batches), or step within rt.scaled(1 / n)"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gives back, free of any graph.

    ``loss`` (0-d) is that of the full batch, on every rank; ``outputs`` the model's outputs for the full
    batch in its own structure, where asked for.
    """

    loss: Tensor
    outputs: Any = None

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Always raises :class:`InputError`: the step has made the gradients."""
        raise InputError(DONE)

    def _refuse(self, *other: Any) -> NoReturn:
        raise InputError(f"this is a step's result; its number is result.loss. {DONE}")

    __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __truediv__ = __iter__ = __getitem__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        outputs = "; step(..., return_outputs=True) gives the model's output as result.outputs"
        hint = f"; the loss has: result.loss.{name}" if hasattr(Tensor, name) else outputs
        raise AttributeError(f"a step's result has loss and outputs, not {name!r}{hint}")
