"""The modes that a model's own code sets modules to: ``self.backbone.eval()`` in a forward.

Noticing that it does is left to ``attributes``, calling a leaf in such modes to ``calls.module_modes``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from ..calls.module_modes import Modes
from ..code.position import Position

__all__ = ["Switched"]


class Switched:
    """What the code that is being recorded, and no leaf's, sets the ``training`` flags of modules to."""

    def __init__(self, at: Position) -> None:
        self._at = at
        self._begun: dict[int, bool] = {}
        self._now: dict[int, bool] = {}

    def begin(self, modules: Iterable[nn.Module]) -> None:
        """The model is about to be called in the modes that its modules have."""
        with self._at.hushed:
            self._begun = {id(m): m.training for m in modules}

    def note(self, module: nn.Module, mode: bool) -> None:
        """A module is being set to a mode."""
        if self._at.is_recorded and id(module) in self._begun:
            self._now[id(module)] = bool(mode)

    def of(self, inside: Sequence[nn.Module]) -> Modes:
        """The modes that modules are to run in; None for those that run in their own."""
        modes = tuple(self._mode(m) for m in inside)
        return modes[0] if len({*modes}) == 1 else modes

    def _mode(self, module: nn.Module) -> bool | None:
        known = self._now.get(id(module))
        if known is not None:
            return known
        mode = vars(module).get("training")  # who watches the attribute need not be told
        mode = module.training if mode is None else mode
        # one that a leaf's own code has set, or code that no one sees
        return None if mode == self._begun.get(id(module), mode) else mode

    def left(self) -> frozenset[tuple[str, bool]]:
        """The modules by path that have been set, and the modes that they are left in."""
        return frozenset((self._at.modules[number], mode) for number, mode in self._now.items())
