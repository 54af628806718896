"""Passes over a part of a microbatch's ops again and again, as a rank of a pipeline runs its stage.

A pass over the whole model tells what all ops take together. What each part of it takes differs where a part
by itself, its weights, their gradients and what backward keeps, stays in a cache that holds no whole model.
Ops piece by piece and the model as a whole are left to ``passes``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..torch_private import pytree
from .replay import Piece, Replay, Tape, leaf
from .samples import next_to_every
from .timers import Stopwatch

__all__ = ["Parts", "leaning"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """What a part is given: the values it takes, and those it gave in a pass of all with their gradients."""

    takes: Mapping[str, Any]
    leaves: dict[str, Any]


class Parts:
    """Neighbouring pieces of a replay in as many parts of about equal work as there are ranks.

    ``of`` has the number of each node's part, by name.
    """

    def __init__(
        self, replay: Replay, pieces: Sequence[Piece], work_s: Callable[[Piece], float], n_parts: int
    ) -> None:
        self.replay = replay
        self._over = replay.over()
        self._pieces = [replay.piece(nodes) for nodes in _shared(pieces, work_s, n_parts)]
        self.of = {n.name: number for number, piece in enumerate(self._pieces) for n in piece.nodes}
        self._held: list[_Held] = []

    def __len__(self) -> int:
        return len(self._pieces)

    def run(self, number: int, watch: Stopwatch) -> None:
        """One forward (``F``) and one backward (``B``) of a part, which ``watch`` times."""
        if not self._held:
            self._held = self._in_turn()
        piece, held = self._pieces[number], self._held[number]
        env = {name: pytree.tree_map_only(Tensor, leaf, value) for name, value in held.takes.items()}
        tape = self.replay.forward(piece, env, watch("F"), self._over)
        roots, gradients = self.replay.gradients(Tape(tape.roots, held.leaves, tape.feed))
        with watch("B"):
            if roots:
                torch.autograd.backward(roots, gradients)

    def _in_turn(self) -> list[_Held]:
        """What each part is given, by a pass of all of them."""
        env = {**self.replay.inputs(), **self.replay.made_up}
        nothing = contextlib.nullcontext()
        tapes = [self.replay.forward(piece, env, nothing, self._over) for piece in self._pieces]
        self.replay.seed(env)
        for tape in reversed(tapes):
            roots, gradients = self.replay.gradients(tape)
            if roots:
                torch.autograd.backward(roots, gradients)
        return [_Held(tape.feed, tape.leaves) for tape in tapes]


def leaning(by_ops: Sequence[float], rounds: Sequence[Sequence[float]]) -> list[float]:
    """How much longer each part takes than its ops' share of the whole, as rounds over all parts tell.

    ``by_ops`` are the seconds of each part's ops, ``rounds`` those of the parts themselves. 1 for a part that
    next to every round does not tell to be longer, or to be shorter, and for all where none is.

    >>> leaning([2.0, 2.0], [[1.1, 0.9], [1.1, 0.9], [1.1, 0.9]])
    [1.1, 0.9]
    >>> leaning([2.0, 2.0], [[1.1, 0.9], [0.9, 1.1], [1.1, 0.9]])
    [1.0, 1.0]
    """
    if not rounds or not all(by_ops):
        return [1.0] * len(by_ops)
    found = []
    for number, own in enumerate(by_ops):
        share = own / sum(by_ops)
        ratios = [r[number] / sum(r) / share for r in rounds]
        is_told = next_to_every(r < 1.0 for r in ratios) or next_to_every(r > 1.0 for r in ratios)
        found.append(statistics.median(ratios) if is_told else 1.0)
    total = sum(f * own for f, own in zip(found, by_ops, strict=True)) / sum(by_ops)
    return [f / total for f in found]


def _shared(pieces: Sequence[Piece], work_s: Callable[[Piece], float], n_parts: int) -> list[list[Any]]:
    """The nodes of pieces in parts of about equal work, in their order."""
    ends = list(itertools.accumulate(map(work_s, pieces)))
    parts: list[list[Any]] = [[] for _ in range(n_parts)]
    for piece, end, before in zip(pieces, ends, [0.0, *ends], strict=False):
        middle = (before + end) / 2
        parts[min(n_parts - 1, int(n_parts * middle / ends[-1])) if ends[-1] else 0] += piece.nodes
    return [part for part in parts if part]
