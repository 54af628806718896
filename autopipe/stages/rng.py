"""Random numbers that do not depend on where the cuts are: a seed of its own for every op and microbatch.

Generated stage code calls :func:`reseed` before each op that draws. Outside a :func:`scope` it does
nothing, so stages called in turn draw from the global generator exactly as the model does. Opening scopes
is left to ``runtime``.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from types import TracebackType

import torch

__all__ = ["mix", "reopened", "reseed", "scope"]

_seed: int | None = None
_MASK = (1 << 63) - 1


@contextlib.contextmanager
def scope(seed: int, microbatch: int) -> Iterator[None]:
    """Within it every random op draws from a stream fixed by ``seed``, ``microbatch`` and the op's name.

    Scopes nest; the generators are left where the last op put them, so a caller that must not disturb the
    user's stream saves and restores it around a whole step.
    """
    global _seed
    outer, _seed = _seed, mix(seed, microbatch)
    try:
        yield
    finally:
        _seed = outer


class _Reopened:
    """A scope to enter any number of times."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._outer: list[int | None] = []

    def __enter__(self) -> None:
        global _seed
        self._outer.append(_seed)
        _seed = self._seed

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        global _seed
        _seed = self._outer.pop()


def reopened() -> _Reopened | None:
    """The scope that is open now, to be entered again later; None where none is."""
    return None if _seed is None else _Reopened(_seed)


def reseed(op: str) -> None:
    """Seed the default generators for ``op`` when a scope is open."""
    if _seed is None:
        return
    seed = mix(_seed, zlib.crc32(op.encode()))
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


def mix(a: int, b: int) -> int:
    """SplitMix64's finaliser over the pair: nearby seeds give unrelated streams."""
    z = (a * 0x9E3779B97F4A7C15 + b + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) & _MASK
