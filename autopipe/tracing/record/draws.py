"""Tells which calls draw random numbers, and which draws of which module they are.

Keeping those calls in order is left to ``opgraph``, seeding them to ``stages``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ... import accelerator
from ...torch_private import HiddenMode, TorchDispatchMode
from ..calls.streams import DRAWING, Stream, drawer
from ..state.reach import state_of

__all__ = ["Draws", "OwnGenerators", "Streams"]


class Draws:
    """Tells which calls draw random numbers: by the generators' state, on meta by the ops' tags."""

    def __init__(self, device: torch.device) -> None:
        self.tagged = _Tagged() if device.type == "meta" else None
        own = accelerator.default_generator(device)
        self.own = None if own is torch.default_generator else own
        self.state = self._read()

    def _read(self) -> bytes:
        state = torch.default_generator.get_state().numpy().tobytes()
        return state if self.own is None else state + self.own.get_state().numpy().tobytes()

    def drawn(self) -> bool:
        """Whether random numbers were drawn since the last question."""
        if self.tagged is not None:
            was, self.tagged.seen = self.tagged.seen, False
            return was
        before, self.state = self.state, self._read()
        return self.state != before

    def __enter__(self) -> Draws:
        if self.tagged is not None:
            self.tagged.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.tagged is not None:
            self.tagged.__exit__(*error)


class OwnGenerators:
    """Tells which random generators of the model's ``own``, by name, were drawn from."""

    def __init__(self, own: Sequence[tuple[str, Any]] = ()) -> None:
        self._own = own
        self._states = [state_of(g) for _, g in own]

    def drawn(self) -> frozenset[str]:
        """Those that were drawn from, or seeded, since the last question."""
        if not self._own:
            return frozenset()
        before, self._states = self._states, [state_of(g) for _, g in self._own]
        pairs = zip(self._own, self._states, before, strict=True)
        return frozenset([name for (name, _), now, then in pairs if now != then])


class _Tagged(TorchDispatchMode):
    """Notes ops that draw random numbers; on the meta device no generator moves."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class Streams(HiddenMode):
    """Counts the calls that may draw by the module that makes them; entered where no other mode sees them.

    Each call is shown to ``look`` as well, with its arguments.
    """

    def __init__(self, modules: Mapping[int, str], look: Callable[[Any, Any, Any], None]) -> None:
        super().__init__()
        self.modules, self.look = modules, look
        self.counts: Counter[str] = Counter()
        self.starts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.look(func, args, kwargs)
        if func in DRAWING:
            self.note()
        return func(*args, **kwargs) if kwargs else func(*args)

    def note(self) -> None:
        """A function that may draw is about to be called."""
        self.counts[drawer(self.modules) or ""] += 1

    def since(self, before: Counter[str], inside: Sequence[nn.Module]) -> tuple[int, ...] | None:
        """How many of them each of some modules has made since; None where other code has, too."""
        more = self.counts - before
        made = tuple([more.get(self.modules.get(id(m), ""), 0) for m in inside])
        return made if sum(made) == more.total() else None

    def count(self, inside: Sequence[nn.Module], made: Sequence[int]) -> None:
        """Take it that each of some modules has made so many."""
        self.counts.update({self.modules[id(m)]: n for m, n in zip(inside, made, strict=True) if n})

    def here(self) -> Stream:
        """The stream of an op that the code running now is about to call."""
        owner = drawer(self.modules) or ""
        return self._stream(owner, (owner,))

    def of_module(self, path: str, inside: Sequence[nn.Module]) -> Stream:
        """The stream of a call of the module at ``path``, which has those ``inside``."""
        return self._stream(path, (self.modules[id(m)] for m in inside if id(m) in self.modules))

    def _stream(self, owner: str, paths: Iterable[str]) -> Stream:
        start = self.starts[owner]
        self.starts[owner] += 1
        counts = tuple(sorted((p, n) for p in paths if (n := self.counts.get(p)))) if self.counts else ()
        return Stream(owner, start, counts)
