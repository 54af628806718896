"""Calls of torch that need every parameter of a model: refused where this rank has a part of them.

``torch.nn.utils.clip_grad_norm_`` would clip each rank's part by that part's own norm, ``LBFGS`` search along
it, and Prodigy find its step size from it; an optimizer that shares its work among ranks would do so among
those of other stages.

An optimizer's ``state_dict`` goes by position: one rank's would fit another's, whose layers have the same
shapes. A module's ``load_state_dict`` is counted: where one rank alone calls it, its weights are no longer
those that the others' go with. Clipping over all ranks is left to ``precision``, keeping the state of all to
``checkpoint``.
"""

from __future__ import annotations

import functools
import inspect
import logging
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...arguments import brief
from ...errors import InputError, StaleError
from ...stages import rng
from ...torch_private import CLIP, TOTAL_NORM

__all__ = ["OF", "n_scaled", "refuse_line_search", "watch", "watch_scalers", "watch_scaling"]

_logger = logging.getLogger(__name__)

LINE_SEARCH = "torch.optim.lbfgs"
OF = "of"
"""Where an optimizer's ``state_dict`` says whose state it is: the names of the rank's parameters."""


class PartOfModel(Protocol):
    """Who trains a part of a model here."""

    def partial(self) -> Iterable[nn.Parameter]:
        """Parameters that are here while others of the same model are not."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that this rank trains, by name."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those of the job that hold the model's parts."""

    def note_load(self, module: nn.Module) -> None:
        """That a module, maybe of this model, has taken a ``state_dict``."""

    def note_options(self, optimizer: optim.Optimizer, *, is_after: bool) -> None:
        """That an optimizer, maybe of this model, is about to step, or ``is_after`` that."""

    @property
    def scaler(self) -> object:
        """What it scales losses with, on all ranks alike; None where it does not."""


_watched: weakref.WeakSet[PartOfModel] = weakref.WeakSet()
_scaled: weakref.WeakSet[PartOfModel] = weakref.WeakSet()
_hooks: list[Any] = []
_n_scaled: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_tried: weakref.WeakSet[optim.Optimizer] = weakref.WeakSet()
"""Optimizers that take parameters one by one, as a trial has told."""
_refused: weakref.WeakSet[optim.Optimizer] = weakref.WeakSet()
"""Those that were refused a step."""


def watch(owner: PartOfModel) -> None:
    """From now on, while it lives, refuse clipping by the norm of its part, and other parts' states."""
    _watched.add(owner)
    _change(
        (*CLIP, _looking),
        (*TOTAL_NORM, _telling),
        (optim.Optimizer, "state_dict", _signed),
        (optim.Optimizer, "load_state_dict", _comparing),
        (optim.Optimizer, "zero_grad", _trying),
        (nn.Module, "load_state_dict", _counted),
    )
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_refuse_other_stages))
        _hooks.append(register_optimizer_step_pre_hook(_refuse_step))
        _hooks.append(register_optimizer_step_pre_hook(functools.partial(_note_options, False)))
        _hooks.append(register_optimizer_step_post_hook(functools.partial(_note_options, True)))


def watch_scalers(owner: PartOfModel) -> None:
    """From now on, while it lives, say what to do with a ``GradScaler`` that none of its steps has used."""
    _scaled.add(owner)
    _change(*((torch.amp.GradScaler, name, _told_of) for name in ("unscale_", "step")))


def watch_scaling(scaler: Any) -> None:
    """From now on count the losses that are scaled by it and its kind: :func:`n_scaled`."""
    _change((type(scaler), "scale", _counting))


def n_scaled(scaler: Any) -> int:
    """How many losses with a graph this ``GradScaler`` has been given."""
    return _n_scaled.get(scaler, 0)


def _counting(scale: Any) -> Any:
    @functools.wraps(scale)
    def counted(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(outputs, Tensor) or outputs.requires_grad:
            _n_scaled[self] = n_scaled(self) + 1
        return scale(self, outputs, *args, **kwargs)

    return counted


def _change(*places: tuple[Any, str, Any]) -> None:
    for place, name, changed in places:
        present = getattr(place, name)
        if not hasattr(present, "looks_for_parts"):
            made = changed(present)
            made.looks_for_parts = True
            setattr(place, name, made)


def _told_of(method: Any) -> Any:
    @functools.wraps(method)
    def called(self: torch.amp.GradScaler, optimizer: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self.is_enabled() and not hasattr(self, "process_group"):
            _refuse_own_overflow(self, optimizer)
        try:
            return method(self, optimizer, *args, **kwargs)
        except AssertionError as error:  # torch's, where no loss was scaled before
            held = {id(p) for own in optimizer.param_groups for p in own["params"]}
            if not any(id(p) in held for owner in _scaled for _, p in owner.named_parameters()):
                raise
            raise InputError(
                "the scaler has scaled none of the gradients that this optimizer steps: give it to the "
                "runtime, pipe.runtime(scaler=scaler), and after rt.step(...) call scaler.step(optimizer) "
                "and scaler.update()"
            ) from error

    return called


def _refuse_own_overflow(scaler: torch.amp.GradScaler, optimizer: optim.Optimizer) -> None:
    """Raise :class:`InputError` for one that would skip the step of this rank's part of a model alone."""
    held = {id(p) for own in optimizer.param_groups for p in own["params"]}
    for owner in _watched:
        if owner.scaler is not scaler and any(id(p) in held for p in owner.partial()):
            raise InputError(
                "this scaler looks for overflows among the gradients of this rank alone, and would skip its "
                "step where others make theirs: give it to the runtime, pipe.runtime(scaler=scaler), which "
                "tells all ranks; the rest of the loop stays as it is"
            )


def _refuse_other_stages(optimizer: optim.Optimizer, *_: Any) -> None:
    """Raise :class:`InputError` where an optimizer works with ranks whose parameters are others."""
    group = getattr(optimizer, "process_group", None)
    if not isinstance(group, dist.ProcessGroup):
        return
    ranks = set(dist.get_process_group_ranks(group))
    held = {id(p) for own in optimizer.param_groups for p in own["params"]}
    for owner in _watched:
        if len(ranks & {*owner.ranks}) > 1 and any(id(p) in held for _, p in owner.named_parameters()):
            raise InputError(
                f"{type(optimizer).__name__} shares its parameters among ranks {sorted(ranks)}, and the "
                f"pipeline's, {list(owner.ranks)}, hold other stages' and not replicas of them: make it with "
                "process_group=mesh.get_group('dp'), of the mesh that pipe.runtime(mesh=...) was given, or "
                "without replicas take a plain optimizer"
            )


def _note_options(is_after: bool, optimizer: optim.Optimizer, *_: Any) -> None:
    for owner in _watched:
        owner.note_options(optimizer, is_after=is_after)


def _refuse_step(optimizer: optim.Optimizer, *_: Any) -> None:
    try:
        _refuse_numbers_of_all(optimizer)
    except InputError:
        _refused.add(optimizer)
        raise


def _refuse_numbers_of_all(optimizer: optim.Optimizer) -> None:
    """Raise :class:`InputError` where an optimizer goes by all its parameters, and has a part of them."""
    if type(optimizer).__module__.startswith("torch.") or optimizer in _tried:
        return
    part = {id(p) for owner in _watched for p in owner.partial()}
    if part and any(id(p) in part for own in optimizer.param_groups for p in own["params"]):
        if mixes_parameters(optimizer):
            raise InputError(
                f"{type(optimizer).__name__} makes a number of all its parameters' gradients, as a step size "
                "or a norm, and each rank's has its own alone: use one that takes parameters one by one "
                "(SGD, Adam), rt.clip_grad_norm_(max_norm) for a norm over all, or train in one process"
            )
        _tried.add(optimizer)


def mixes_parameters(optimizer: optim.Optimizer) -> bool:
    """Whether a step of its kind gives a parameter other values where there is a second one.

    Tried out on two small matrices; False for one that cannot be made of its ``defaults`` and the optimizers
    that it is around, or draws, as where its second parameter finds other random numbers. One that asks for a
    closure gets one. Compared are the last values that all are finite: steps grow.
    """

    def moved(*which: int) -> Tensor:
        """How far each parameter is from its start after each step."""
        starts = [torch.tensor(rows, dtype=torch.float64, device="cpu") for rows in _TRIED]
        tried = [nn.Parameter(starts[i].clone()) for i in which]
        step, found = _stepping(_like(optimizer, tried)), list[Tensor]()
        for scale, more in _TRIED_GRADIENTS:
            first = [scale * more**i * starts[i].flip(0) for i in which]
            here = [p.detach().clone() for p in tried]

            def differentiate(
                scale: float = scale, first: list[Tensor] = first, here: list[Tensor] = here
            ) -> Tensor:
                for parameter, gradient, was in zip(tried, first, here, strict=True):
                    parameter.grad = gradient + scale * (parameter.detach() - was)
                return torch.zeros((), device="cpu")

            differentiate()
            step(differentiate)
            found.append(torch.stack([p.detach() - starts[i] for i, p in zip(which, tried, strict=True)]))
        return torch.stack(found)

    with torch.random.fork_rng(devices=[]), rng.Outside().keep():
        before = _drawing()
        try:
            both, alone = moved(0, 1), torch.cat([moved(0), moved(1)], 1)
        except Exception:  # any Python
            _logger.debug("%s could not be tried out", type(optimizer).__name__, exc_info=True)
            return False
        if _drawing() != before:
            return False
    is_finite = (both.isfinite() & alone.isfinite()).flatten(1).all(1)
    n = int(is_finite.cumprod(0).sum())
    return n > 0 and not torch.allclose(both[n - 1], alone[n - 1], rtol=1e-6, atol=0)


def _like(optimizer: optim.Optimizer, parameters: Sequence[nn.Parameter]) -> optim.Optimizer:
    """One of its kind for other parameters, by its ``defaults`` and the classes of those it is around."""
    kind = type(optimizer)
    asked = inspect.signature(kind.__init__).parameters
    given = {k: v for k, v in optimizer.defaults.items() if k in asked}
    around = {k: v for k, v in vars(optimizer).items() if k in asked and isinstance(v, optim.Optimizer)}
    given |= {k: type(inner) for k, inner in around.items()}
    if any(p.kind is p.VAR_KEYWORD for p in asked.values()):
        for inner in around.values():
            takes = inspect.signature(type(inner).__init__).parameters
            given |= {k: v for k, v in inner.defaults.items() if k in takes and k not in given}
    return kind(parameters, **given)


def _stepping(optimizer: optim.Optimizer) -> Callable[[Callable[[], Tensor]], None]:
    """Its step, which is given a closure once it has failed without."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # the user's hooks are not for it
    asks: list[bool] = []

    def stepped(closure: Callable[[], Tensor]) -> None:
        if not asks:
            try:
                step(optimizer)
            except Exception:  # any Python
                asks.append(True)
        if asks:
            step(optimizer, closure)

    return stepped


def _drawing() -> tuple[Any, ...]:
    """Where the generators are that an optimizer may draw from."""
    return torch.default_generator.get_state().tolist(), random.getstate(), str(np.random.get_state())


_TRIED = ((0.5, -0.3), (0.2, 0.7)), ((0.1, 0.9), (-0.6, 0.4))
_TRIED_GRADIENTS = (
    *((scale, 2.0) for scale in (1.0, 1.0, 1e4, 1.0, 1e-4, 1.0)),
    *((1e-3 * 1.3**i, 0.8) for i in range(62)),
)
"""The scale of each step's gradients, and how much larger the second's is: some optimizers clip, or leave
out, large ones alone. Those of the second row are nearly alike, and 1.3 times the last: where there is a norm
above which a step is skipped, that of both is above it once and that of each is not."""


def _looking(clip: Any) -> Any:
    @functools.wraps(clip)
    def clipped(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(_is_of_part(parameters, owner.partial()) for owner in _watched):
            raise StaleError(
                "these parameters are this rank's own, and their norm is not that of the model's gradients: "
                "rt.clip_grad_norm_(max_norm) clips and returns the norm over all ranks"
            )
        return clip(parameters, *args, **kwargs)

    return clipped


def _is_of_part(asked: Sequence[Tensor], part: Iterable[Tensor]) -> bool:
    """Whether what is asked about is of a rank's part of a model, and not one of several there by itself."""
    own = {id(tensor) for tensor in part}
    return not own.isdisjoint(map(id, asked)) and not len(asked) == 1 < len(own)


def _telling(grouped: Any) -> Any:
    """What ``get_total_norm`` begins with, and a warning where that is asked of a part.

    Who sums it over ranks by hand is right.
    """
    asks = inspect.unwrap(nn.utils.get_total_norm).__code__

    @functools.wraps(grouped)
    def told(lists: Sequence[Sequence[Tensor]], *args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_code is asks:
            grads = [[p.grad for p in owner.partial() if p.grad is not None] for owner in _watched]
            if any(_is_of_part([t for tensors in lists for t in tensors], own) for own in grads):
                _logger.warning(
                    "get_total_norm got the gradients that this rank trains, and gives the norm of those "
                    'alone: rt.clip_grad_norm_(float("inf")) gives that of all ranks, '
                    "rt.clip_grad_norm_(max_norm) clips"
                )
        return grouped(lists, *args, **kwargs)

    return told


def _names(optimizer: optim.Optimizer) -> list[str]:
    """Those of this rank's parameters that it steps."""
    name_of: dict[int, str] = {}
    for owner in _watched:
        for name, parameter in owner.named_parameters():
            name_of[id(parameter)] = min(name, name_of.get(id(parameter), name))
    held = (id(p) for group in optimizer.param_groups for p in group["params"])
    return [name_of[i] for i in held if i in name_of]


def _trying(zero_grad: Any) -> Any:
    """What is stepped in parts, by methods of its own, is tried out here: torch calls no hook for those."""

    @functools.wraps(zero_grad)
    def tried(self: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self not in _refused:
            _refuse_numbers_of_all(self)
        return zero_grad(self, *args, **kwargs)

    return tried


def _signed(state_dict: Any) -> Any:
    @functools.wraps(state_dict)
    def signed(self: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        found, names = state_dict(self, *args, **kwargs), _names(self)
        return {**found, OF: names} if names else found

    return signed


def _comparing(load_state_dict: Any) -> Any:
    @functools.wraps(load_state_dict)
    def compared(self: optim.Optimizer, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        names, given = _names(self), state_dict.get(OF)
        if names and given is not None and given != names:
            raise InputError(
                f"this is the optimizer state of {brief(given)}, and this rank's optimizer steps "
                f"{brief(names)}: rt.save(folder, optimizer=optimizer) keeps the state of all ranks, and "
                "rt.load(folder, optimizer=optimizer) gives each rank its own; a state_dict is for the rank "
                "alone that made it"
            )
        return load_state_dict(self, state_dict, *args, **kwargs)

    return compared


def _counted(load_state_dict: Any) -> Any:
    """Weights of one rank and what others of it have would be mixed where that rank alone loads."""

    @functools.wraps(load_state_dict)
    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = load_state_dict(self, *args, **kwargs)
        for owner in _watched:
            owner.note_load(self)
        return found

    return counted


def refuse_line_search() -> None:
    """Raise :class:`InputError` where a closure of torch's ``LBFGS`` has called this."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == LINE_SEARCH:
            raise InputError(
                "LBFGS searches along the gradients of all parameters, and each rank has only its own: use "
                "an optimizer that takes parameters one by one (SGD, Adam), or train in one process"
            )
