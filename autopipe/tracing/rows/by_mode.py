"""Whether code that stays whole does something in training that it does not in evaluation, dropout apart.

Code that a recording does not show may go by the mode, and mix rows in training alone. Whether it does is
left to ``mixing``.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..calls.call import Call, Recording
from ..calls.faults import of_models
from ..calls.functions import tensors
from ..code.own_code import OwnCode
from ..state.example_data import close_to
from .noise import EvenNoise, NoDropout, is_drawn
from .results import Rows

__all__ = ["Evaluated", "InTraining", "in_training"]

_logger = logging.getLogger("autopipe")


class Evaluated:
    """What the model's own code in calls of a form gives in evaluation, in the first run on rows a and b."""

    def __init__(self, code: OwnCode, form: Recording) -> None:
        self.places = [i for i, call in enumerate(form.calls) if code.is_own(call)]
        self._asked = {id(form.calls[i]) for i in self.places}
        self._values: dict[int, list[Tensor]] = {}
        self._is_over = False

    def first(self, run: Rows, rows: str, look: Callable[[Call, Any], Any] | None = None) -> Any:
        """What ``run`` gives; until one has run to its end, runs on rows a and b are looked at."""

        def shown(call: Call, value: Any) -> Any:
            if id(call) in self._asked:
                self._values[id(call)] = [t.detach().clone() for t in tensors(value)]
            return None if look is None else look(call, value)

        is_looked_at = rows == "ab" and not self._is_over
        result = run(rows, shown if is_looked_at else look)
        self._is_over |= is_looked_at
        return result

    def complete(self, run: Rows) -> None:
        """Run the form on rows a and b where it has not yet."""
        if not self._is_over:
            self.first(run, "ab")

    def is_other(self, call: Call, value: Any) -> bool:
        """Whether a call gives something else now, if it runs such code."""
        if id(call) not in self._asked:
            return False
        then, now = self._values[id(call)], tensors(value)
        return len(then) != len(now) or not all(map(close_to, then, now))


class InTraining(NamedTuple):
    """What the model's own code does in training.

    Attributes
    ----------
    is_other: whether it gives something else than in evaluation where dropout leaves out nothing.
    is_noisy: whether it draws anything but torch's own dropout.
    """

    is_other: bool
    is_noisy: bool


def in_training(
    evaluated: Evaluated,
    form: Recording,
    run_in: Callable[[bool], Rows],
    device: torch.device,
    look: Callable[[Call, Any], None],
) -> InTraining:
    """What the model's own code in calls does in training: anything where none can tell.

    Two runs of a form that serves both modes, on the same rows, three where other noise than torch's dropout
    is drawn: ``run_in`` gives what runs it in a mode, in evaluation where it was not yet ``evaluated``. In
    training dropout leaves out nothing, and ``look`` is shown each call with its value and what that came of.
    """
    if not evaluated.places:
        return InTraining(False, False)
    is_noisy = any(c.is_random for c in form.calls[: evaluated.places[-1] + 1])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            evaluated.complete(run_in(False))
            plain = NoDropout() if is_noisy else contextlib.nullcontext()
            is_other = _is_other(evaluated, plain, run_in(True), look)
            if not (isinstance(plain, NoDropout) and is_drawn(device)):
                return InTraining(is_other, isinstance(plain, NoDropout) and not plain.is_of_rows)
            noise = EvenNoise(device)
            is_other = _is_other(evaluated, noise, run_in(True), look)
    except of_models() as error:
        # any Python of the model, on rows it may not take; or noise that is not known
        _logger.debug("the modes could not be told apart: %s", error)
        return InTraining(True, True)
    return InTraining(is_other or not noise.is_dropout, not noise.is_of_rows)


def _is_other(
    evaluated: Evaluated,
    noise: contextlib.AbstractContextManager[Any],
    run: Rows,
    look: Callable[[Call, Any], None],
) -> bool:
    """Whether own code gives something else than in evaluation, in a run with gradients within ``noise``."""
    is_other = False

    def compare(call: Call, value: Any) -> None:
        nonlocal is_other
        look(call, value)
        is_other |= evaluated.is_other(call, value)

    with noise, torch.enable_grad():
        run("ab", compare)
    return is_other
