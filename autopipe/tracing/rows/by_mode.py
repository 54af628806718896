"""Whether code that stays whole does something in training that it does not in evaluation, dropout apart.

Code that a recording does not show may go by the mode, and mix rows in training alone. Whether it does is
left to ``mixing``.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..calls.call import Call, Recording
from ..calls.functions import tensors
from ..code.own_code import OwnCode
from ..state.example_data import close_to
from .noise import EvenNoise
from .results import Rows

__all__ = ["is_other_in_training"]

_logger = logging.getLogger("autopipe")


def is_other_in_training(
    code: OwnCode,
    form: Recording,
    run_in: Callable[[bool], Rows],
    device: torch.device,
    look: Callable[[Call, Any], None],
) -> bool:
    """Whether the model's own code in a call gives something else in training; so too where none can tell.

    Two runs of a form that serves both modes, on the same rows: ``run_in`` gives what runs it in a mode. In
    training dropout leaves out nothing, and ``look`` is shown each call with its value and what that came of.
    """
    places = [i for i, call in enumerate(form.calls) if code.is_own(call)]
    if not places:
        return False
    asked = {id(form.calls[i]) for i in places}
    is_noisy = any(c.is_random for c in form.calls[: places[-1] + 1])
    noise = EvenNoise(device) if is_noisy else contextlib.nullcontext()
    seen: dict[int, list[Tensor]] = {}
    is_other = False

    def keep(call: Call, value: Any) -> None:
        if id(call) in asked:
            seen[id(call)] = [t.detach().clone() for t in tensors(value)]

    def compare(call: Call, value: Any) -> None:
        nonlocal is_other
        look(call, value)
        if id(call) in asked:
            there = [*tensors(value)]
            is_other |= len(there) != len(seen[id(call)]) or not all(map(close_to, seen[id(call)], there))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_in(False)("ab", keep)
            with noise, torch.enable_grad():
                run_in(True)("ab", compare)
    except Exception as error:  # any Python of the model, on rows it may not take; or noise that is not known
        _logger.debug("the modes could not be told apart: %s", error)
        return True
    return is_other or (isinstance(noise, EvenNoise) and not noise.is_dropout)
