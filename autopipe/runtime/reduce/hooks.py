"""The user's hooks on parameters' gradients: called once with those of a step, as one backward would.

What a step's gradients are is left to ``stage.worker`` and the rest of ``reduce``. Each microbatch's
backward would call them with its own part, and each holder of a tied parameter with its own, which is not the
same for a hook that clips, looks or steps an optimizer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import StepError

__all__ = ["OwnHook", "is_hooked", "n_hooks", "n_hooks_after", "once_a_step"]


class OwnHook(functools.partial[None]):
    """A hook that a runtime has on a gradient for what comes between steps: in steps it does nothing.

    It is no user's, also to other runtimes of the same model.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class _Hooked:
    """A parameter, its gradient before the step, and its hooks: on the gradient, and after it was added."""

    place: str
    parameter: nn.Parameter
    before: Tensor | None
    on: list[tuple[dict[Any, Callable[..., Any]], dict[Any, Callable[..., Any]]]]


@contextlib.contextmanager
def once_a_step(parameters: Sequence[nn.Parameter], place: Callable[[nn.Parameter], str]) -> Iterator[None]:
    """Within it hooks of these parameters are kept back; at its end each is called with the whole gradient.

    ``place`` has the words for where each is. Gradients that were there before are added to afterwards.
    Where the step fails no hook is called. Raises :class:`StepError` naming the parameter whose hook does.
    """
    held = [_take(place(p), p) for p in parameters]
    try:
        yield
        made = [hooked.parameter.grad for hooked in held]
    finally:
        for hooked in held:
            for living, kept in hooked.on:
                living.update(kept)
            hooked.parameter.grad = hooked.before
    for hooked, gradient in zip(held, made, strict=True):
        if gradient is not None:
            try:
                _give(hooked, gradient)
            except Exception as error:
                raise StepError(f"{hooked.place}: {type(error).__name__}: {error}") from error


def is_hooked(parameter: nn.Parameter) -> bool:
    """Whether a parameter has hooks of the user's on its gradient."""
    return n_hooks(parameter) > 0


def n_hooks(parameter: nn.Parameter) -> int:
    """How many hooks of the user's a parameter has on its gradient."""
    return len(parameter._backward_hooks or ()) + n_hooks_after(parameter)


def n_hooks_after(tensor: Tensor) -> int:
    """How many hooks it has that are to know when its gradient was added to."""
    hooks = (tensor._post_accumulate_grad_hooks or {}).values()
    return sum(not isinstance(hook, OwnHook) for hook in hooks)


def _take(place: str, parameter: nn.Parameter) -> _Hooked:
    on = []
    for living in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
        kept = dict(living or {})
        if living:
            living.clear()  # the same object: its handles still remove from it
        on.append((living if living is not None else {}, kept))
    before, parameter.grad = parameter.grad, None
    return _Hooked(place, parameter, before, on)


@torch.no_grad()
def _give(hooked: _Hooked, gradient: Tensor) -> None:
    (_, on_gradient), (_, after) = hooked.on
    for hook in on_gradient.values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    hooked.parameter.grad = gradient if hooked.before is None else hooked.before + gradient
    for hook in after.values():
        hook(hooked.parameter)
