"""The user's hooks on parameters' gradients: called once with those of a step, as one backward would.

What a step's gradients are is left to ``worker`` and ``reduce``. Each microbatch's backward would call them
with its own part, which is not the same for a hook that clips, looks or steps an optimizer.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["once_a_step"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Hooked:
    """A parameter, its gradient before the step, and its hooks: on the gradient, and after it was added."""

    parameter: nn.Parameter
    before: Tensor | None
    on: list[tuple[dict[Any, Callable[..., Any]], dict[Any, Callable[..., Any]]]]


@contextlib.contextmanager
def once_a_step(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Within it hooks of these parameters are kept back; at its end each is called with the whole gradient.

    Gradients that were there before are added to afterwards. Where the step fails no hook is called.
    """
    held = [_take(p) for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]
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
            _give(hooked, gradient)


def _take(parameter: nn.Parameter) -> _Hooked:
    on = []
    for living in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
        kept = dict(living or {})
        if living:
            living.clear()  # the same object: its handles still remove from it
        on.append((living if living is not None else {}, kept))
    before, parameter.grad = parameter.grad, None
    return _Hooked(parameter, before, on)


@torch.no_grad()
def _give(hooked: _Hooked, gradient: Tensor) -> None:
    (_, on_gradient), (_, after) = hooked.on
    for hook in on_gradient.values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    hooked.parameter.grad = gradient if hooked.before is None else hooked.before + gradient
    for hook in after.values():
        hook(hooked.parameter)
