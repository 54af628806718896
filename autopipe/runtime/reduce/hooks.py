"""The user's hooks on parameters' gradients: called once with those of a step, as one backward would.

What a step's gradients are is left to ``stage.worker`` and the rest of ``reduce``. Each microbatch's
backward would call them with its own part, and each holder of a tied parameter with its own, which is not the
same for a hook that clips, looks or steps an optimizer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ...errors import StepError
from ...tracing.state.example_data import hooks_kept_back

__all__ = ["OwnHook", "add", "is_hooked", "n_hooks", "n_hooks_after", "once_a_step", "set_aside"]

_aside: list[dict[int, int]] = []
"""How many hooks of parameters, by id, each context keeps back that is under way."""


class OwnHook(functools.partial[None]):
    """A hook that a runtime has on a gradient for what comes between steps: in steps it does nothing.

    It is no user's, also to other runtimes of the same model.
    """


@contextlib.contextmanager
def once_a_step(parameters: Sequence[nn.Parameter], place: Callable[[nn.Parameter], str]) -> Iterator[None]:
    """Within it hooks of these parameters are kept back; at its end each is called with the whole gradient.

    ``place`` has the words for where each is. Gradients that were there before are added to afterwards.
    Where the step fails no hook is called. Raises :class:`StepError` naming the parameter whose hook does.
    """
    made: list[Tensor | None] = []
    with set_aside(parameters, made):
        yield
    for parameter, gradient in zip(parameters, made, strict=True):
        if gradient is not None:
            try:
                add(parameter, gradient)
            except Exception as error:
                raise StepError(f"{place(parameter)}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def set_aside(parameters: Sequence[nn.Parameter], made: list[Tensor | None]) -> Iterator[None]:
    """Within it parameters have no gradients, and hooks that are counted and not called.

    ``made`` gets the gradients that it left, if it ends well.
    """
    kept = [(p, p.grad) for p in parameters]
    told = {id(p): _n_living(p) for p in parameters}
    _aside.append(told)
    for parameter, _ in kept:
        parameter.grad = None
    try:
        with hooks_kept_back(parameters):
            yield
        made.extend(parameter.grad for parameter in parameters)
    finally:
        _aside.remove(told)
        for parameter, before in kept:
            parameter.grad = before


@torch.no_grad()
def add(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add to a parameter's gradient, and call the user's hooks, as a backward that made this would.

    In place, as of views of one buffer for all, but where a sparse gradient cannot hold the sum.
    """
    for hook in list((parameter._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    before = parameter.grad
    if before is None:
        parameter.grad = gradient
    elif before.is_sparse and not gradient.is_sparse:
        parameter.grad = gradient + before
    else:
        before.add_(gradient)
    for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
        if not isinstance(hook, OwnHook):
            hook(parameter)


def is_hooked(parameter: nn.Parameter) -> bool:
    """Whether a parameter has hooks of the user's on its gradient."""
    return n_hooks(parameter) > 0


def n_hooks(parameter: nn.Parameter) -> int:
    """How many hooks of the user's a parameter has on its gradient, those set aside too."""
    return _n_living(parameter) + sum(told.get(id(parameter), 0) for told in _aside)


def n_hooks_after(tensor: Tensor) -> int:
    """How many hooks it has that are to know when its gradient was added to."""
    hooks = (tensor._post_accumulate_grad_hooks or {}).values()
    return sum(not isinstance(hook, OwnHook) for hook in hooks)


def _n_living(parameter: nn.Parameter) -> int:
    return len(parameter._backward_hooks or ()) + n_hooks_after(parameter)
