"""Gives generated modules the model's own submodules, parameters and buffers under the model's own paths.

The code that uses them is left to ``emit`` and, for a stage, to ``stages``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ..members import registered

__all__ = ["OWN", "Scope", "attach", "is_own", "twin_of"]

OWN = ("training", "_device")
"""What a holder answers itself."""
_TWIN = "<twin>"
"""Under which an instance has its twin: no part of a model can be reached by it."""


class Scope(nn.Module):
    """A stand-in for a container of the model that a generated module holds only in part.

    Its mode is the container's own, so a flag read in glue code (``training=self.training``) follows
    ``model.train()`` and ``model.encoder.eval()`` alike.
    """

    def __init__(self, twin: nn.Module) -> None:
        # a one-element list hides the model from nn.Module's bookkeeping
        vars(self)[_TWIN] = [twin]
        super().__init__()

    @property
    def training(self) -> bool:
        return twin_of(self).training

    @training.setter
    def training(self, mode: bool) -> None:
        # nn.Module.__init__ sets the flag before there are submodules; the container's own flag stands
        if "_modules" in self.__dict__:
            twin_of(self).training = mode

    def __getitem__(self, index: int | str) -> Any:
        name, held = str(index), self._modules
        return held[name] if name in held else getattr(self, name)  # which takes long for a module

    def _get_name(self) -> str:
        return type(twin_of(self)).__name__


def is_own(target: str) -> bool:
    """Whether a holder answers itself what is at this path: the mode of any container, and its device."""
    return target in OWN or target.endswith(".training")


def twin_of(scope: Scope) -> nn.Module:
    """The container of the model that a scope stands in for."""
    found: nn.Module = vars(scope)[_TWIN][0]
    return found


def attach(holder: nn.Module, model: nn.Module, targets: Iterable[str], constants: Mapping[str, Any]) -> None:
    """Give ``holder`` what ``targets`` name: the model's own objects, or one of ``constants``.

    The modes of containers, and the device at the top, are the holder's to answer.
    """
    for target in sorted(set(targets), key=lambda t: (t.count("."), t)):
        if target in constants:
            _keep(holder, target, constants[target])
            continue
        *path, name = target.split(".")
        scope, twin = holder, model
        for part in path:
            twin = registered(twin, part)
            existing = scope._modules.get(part)
            if existing is None:
                existing = scope._modules[part] = Scope(twin)
            if not isinstance(existing, Scope):
                break  # the whole submodule is here already
            scope = existing
        else:
            if not is_own(target):
                _share(scope, twin, name)


def _keep(holder: nn.Module, name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        holder.register_buffer(name, value, persistent=False)
    else:
        setattr(holder, name, value)


def _share(scope: nn.Module, twin: nn.Module, name: str) -> None:
    """Registered as in the model, whatever else the holder has under that name."""
    for theirs, own in (
        (twin._parameters, scope._parameters),
        (twin._buffers, scope._buffers),
        (twin._modules, scope._modules),
    ):
        if name in theirs:
            own[name] = theirs[name]  # type: ignore[assignment]
            if name in twin._non_persistent_buffers_set:
                scope._non_persistent_buffers_set.add(name)
            return
    setattr(scope, name, getattr(twin, name))
