"""Random numbers that do not depend on where the cuts are: a stream of its own for every draw.

The stream hangs on the seed of the step, the microbatch, the module whose forward draws, and how many draws
it made before; so it is the same whether a leaf hides the draw or the plan opened the leaf. Generated stage
code calls :func:`reseed` before each op that draws, and :func:`reseed_all` before one that draws from
Python's or numpy's generator too: of those all draws of an op are one stream. Outside a :class:`Scope`
neither does anything: stages called in turn draw from the global generators exactly as the model does.
Opening scopes is left to ``runtime``.
"""

from __future__ import annotations

import contextlib
import random
import threading
import types
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from .. import accelerator
from ..torch_private import HiddenMode
from ..tracing.calls.streams import DRAWING, drawer
from ..tracing.graphs import scope as graphs_scope

__all__ = ["SEEDING", "Outside", "Scope", "mix", "opened", "reseed", "reseed_all"]

_MASK = (1 << 63) - 1
_open = threading.local()


class Scope(HiddenMode):
    """Within it every draw comes from a stream fixed by ``seed``, ``microbatch``, module and count.

    Scopes nest, and may be entered any number of times: for the forward of a microbatch, and for its
    backward, where checkpointed parts run again. Which draw comes next is read off the generator: its seed
    names the place, so whoever puts the generator back, as checkpoints do, has the same numbers again. The
    generators are left where the last draw put them; a caller that must not disturb the user's saves and
    restores them around a step.

    ``paths`` tells modules by id, ``device`` which generators to seed beside the CPU's. ``outside`` keeps
    Python's and numpy's as they were ahead of the first op that :func:`reseed_all` is called for. Where
    compiled code runs the single draws must not be followed (``follow=False``): each op has one stream for
    all it draws.
    """

    def __init__(
        self,
        seed: int,
        microbatch: int,
        paths: Mapping[int, str] = types.MappingProxyType({}),
        device: torch.device | None = None,
        outside: Outside | None = None,
        *,
        follow: bool = True,
    ) -> None:
        super().__init__()
        self._follow = follow
        self._seed, self._paths = mix(seed, microbatch), paths
        self._generators = _generators(device)
        self.outside = Outside() if outside is None else outside
        self._places: dict[int, tuple[str, Mapping[str, int]]] = {}
        self._outer: list[Scope | None] = []
        self._is_inside = False

    def __enter__(self) -> Scope:
        self._outer.append(getattr(_open, "scope", None))
        _open.scope = self
        if self._follow:
            super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._follow:
            super().__exit__(*error)
        _open.scope = self._outer.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in DRAWING or self._is_inside:
            return func(*args, **(kwargs or {}))
        self._next()
        self._is_inside = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._is_inside = False

    def start(self, owner: str, start: int, counts: Mapping[str, int]) -> int:
        """Seed for an op of ``owner``, which had ``start`` before; its draws so far are in ``counts``."""
        return self._draw_from(f"{owner} from {start}", 0, owner, counts)

    def _next(self) -> None:
        """Seed for the draw to come; not where the model has seeded the generator itself."""
        place = self._places.get(torch.default_generator.initial_seed())
        if place is not None:
            path = drawer(self._paths, graphs_scope.Scope)
            path, counts = place[0] if path is None else path, place[1]
            n = counts.get(path, 0)
            self._draw_from(path, n, place[0], {**counts, path: n + 1})

    def _draw_from(self, name: str, n: int, owner: str, counts: Mapping[str, int]) -> int:
        seed = mix(mix(self._seed, zlib.crc32(name.encode())), n)
        self._places[seed] = owner, counts
        for generator in self._generators:
            generator.manual_seed(seed)
        return seed


def _generators(device: torch.device | None) -> tuple[accelerator.Drawing, ...]:
    own = None if device is None else accelerator.default_generator(device)
    if own is None or own is torch.default_generator:
        return (torch.default_generator,)
    return torch.default_generator, own


def opened() -> contextlib.AbstractContextManager[Any] | None:
    """The scope that is open now, to be entered again later; None where none is."""
    return getattr(_open, "scope", None)


def reseed(owner: str, start: int = 0, counts: Mapping[str, int] | None = None) -> None:
    """Seed the generators for an op whose draws are ``owner``'s, when a scope is open."""
    scope: Scope | None = getattr(_open, "scope", None)
    if scope is not None:
        scope.start(owner, start, counts or {})


def reseed_all(owner: str, start: int = 0, counts: Mapping[str, int] | None = None) -> None:
    """The same for an op that draws from Python's and numpy's generators too."""
    scope: Scope | None = getattr(_open, "scope", None)
    if scope is not None:
        scope.outside.keep()
        seed = scope.start(owner, start, counts or {})
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)


SEEDING = frozenset({reseed, reseed_all})
"""What generated code calls before an op that draws."""


class Outside:
    """Python's and numpy's generators as they were once: put back, or entered for a while."""

    def __init__(self) -> None:
        self._states: tuple[Any, Any] | None = None

    def keep(self) -> Outside:
        """This, with what they are now, unless it has kept that before."""
        if self._states is None:
            self._states = random.getstate(), np.random.get_state()
        return self

    def restore(self) -> None:
        """Put them back, if they were kept."""
        if self._states is not None:
            random.setstate(self._states[0])
            np.random.set_state(self._states[1])

    def __enter__(self) -> None:
        self._now = Outside().keep()
        self.restore()

    def __exit__(self, *error: Any) -> None:
        self._now.restore()


def mix(a: int, b: int) -> int:
    """SplitMix64's finaliser over the pair: nearby seeds give unrelated streams."""
    z = (a * 0x9E3779B97F4A7C15 + b + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) & _MASK
