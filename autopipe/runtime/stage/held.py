"""What a ``loss_fn`` keeps from call to call, noted at one moment and put back.

Who asks it anything meanwhile is left to ``asking``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ... import accelerator
from ...torch_private import UnseenByFunctions
from ...tracing.members import buffers_in, modules_in
from ...tracing.state.global_names import is_users
from ...tracing.state.reach import reached
from ...tracing.state.state import LENGTH_OF, Snapshot, generators

__all__ = ["Held"]

_RUNNERS = ("autopipe.", "torch.nn.parallel", "torch.distributed")
"""Where modules are from that run others, and keep what they do so by."""
_MOST_BYTES = 1 << 28
"""Larger tensors and arrays, beside buffers, are not copied."""


class Held:
    """What a ``loss_fn`` keeps from call to call, and the generators that it may draw from, at one moment.

    Modules that it reaches are its own, in an attribute or a closure, but for those of the ``model``, which
    stages run meanwhile.

    Attributes
    ----------
    snapshot: of it and of what it reaches.
    """

    def __init__(self, loss_fn: Any, model: nn.Module, device: torch.device) -> None:
        self._holder, self._device = _Holder(loss_fn, model), device
        with UnseenByFunctions():  # it may reach weights that other ranks train, and not read them
            self.snapshot = Snapshot(self._holder)
        found, kept = self.snapshot.reached, self.snapshot.tensors
        apart = {id(t) for t in (*model.parameters(), *model.buffers())}
        for key in apart & kept.keys():
            del kept[key]
        others = [t for _, _, t in found.tensors if id(t) not in apart and t.layout is torch.strided]
        for t in others:  # queues are larger than what captures look at
            if t.nbytes <= _MOST_BYTES and id(t) not in kept:
                self.snapshot.keep(t)
        self._left = [(t, t._version) for t in others if id(t) not in kept]
        arrays = (a for a in found.seen.values() if isinstance(a, np.ndarray) and a.flags.writeable)
        self._arrays = [(a, a.copy()) for a in arrays if a.nbytes <= _MOST_BYTES]
        own = accelerator.default_generator(device)
        there = {id(g): g for g in (torch.default_generator, own) if g is not None}
        self._draws = [(g, g.get_state()) for g in there.values()]
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._state = generators(device)

    def put_back(self) -> None:
        """Let it keep what it did, and draw what it would have."""
        self.snapshot.restore()
        for array, value in self._arrays:
            array[...] = value
        for generator, state in self._draws:
            generator.set_state(state)
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    @property
    def can_put_back(self) -> bool:
        """Whether it has written to nothing that is too large to be copied, as data sets are."""
        return all(tensor._version == version for tensor, version in self._left)

    @property
    def has_drawn(self) -> bool:
        """Whether a generator has moved since."""
        return generators(self._device) != self._state

    def buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers that it has now."""
        return {name: b.detach().clone() for name, b in buffers_in(self._holder)}

    def counts(self) -> dict[str, int]:
        """The whole numbers that it has now, but for those in lists, which keep what was."""
        found = [(name, n) for (_, name), n in self.snapshot.numbers().items() if type(n) is int]
        return {
            name: n
            for name, n in found
            if not name.startswith(LENGTH_OF) and not name.rpartition(".")[2].isdigit()
        }


class _Holder(nn.Module):
    """Has a ``loss_fn`` of any kind as an attribute, and the modules that it reaches as its own.

    So are the classes of objects: what their methods name may be written to.
    """

    def __init__(self, loss_fn: Any, model: nn.Module) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self._found: list[tuple[str, nn.Module]] = []
        apart = {id(m) for m in model.modules()}
        while own := [m for m in self._reached() if id(m) not in apart]:
            name = "" if own[0] is self.loss_fn else f"{type(own[0]).__name__}{len(self._found) or ''}"
            for path, module in modules_in(own[0], name):
                if id(module) not in apart and not type(module).__module__.startswith(_RUNNERS):
                    self._found.append((path, module))
                apart.add(id(module))
        self.classes = [*{type(v): None for v in reached(self).seen.values() if is_users(type(v).__module__)}]

    def _reached(self) -> list[nn.Module]:
        return [m for m in (self.loss_fn, *reached(self).seen.values()) if isinstance(m, nn.Module)]

    def named_modules(
        self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[Any]:
        """Itself and these, without those of the model."""
        yield prefix, self
        yield from self._found
