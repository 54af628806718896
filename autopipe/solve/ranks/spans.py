"""What two spans between downsets of a list cost on one rank, and what they save together, many at once.

What one costs as a stage is left to ``lines.pairs``, choosing spans to ``virtual``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..definition.blocks import freed_bytes
from ..definition.problem import HUGE, Array, Problem, Stage, memory_bytes, scaled, stage_ns
from ..lines.pairs import Loads
from ..lines.reach import Bits
from ..lines.windows import Downsets

__all__ = ["Spans", "downsets", "prefixes"]

Span = tuple[Any, Array]
"""Starts and ends of spans, one or an array of each."""

_SIDES: tuple[Any, Any] = (slice(None), None), (None, slice(None))
"""Where the first and the second of two spans stand in a table over pairs of both."""


def downsets(problem: Problem, most: int) -> list[int] | None:
    """Every set of items closed under what must come earlier, as bits; None where there are over ``most``."""
    if len(problem.items) >= most:
        return None
    needs = [sum(1 << u for u in set(before)) for before in problem.before]
    found, layer = {0}, [0]
    while layer:
        following: dict[int, None] = {}
        for inside in layer:
            for v, need in enumerate(needs):
                if not inside >> v & 1 and not need & ~inside:
                    following[inside | 1 << v] = None
        layer = list(following)
        found |= following.keys()
        if len(found) > most:
            return None
    return sorted(found, key=lambda inside: (inside.bit_count(), inside))


def prefixes(order: Sequence[int]) -> list[int]:
    """The downsets that an order passes through."""
    return list(itertools.accumulate((1 << v for v in order), initial=0))


class Spans:
    """Tables over pairs of downsets (from, to): the items of ``to`` that ``from`` has not, as one stage.

    Downsets are by rising work, the first empty and the last whole. ``within`` marks the pairs that are a
    stage. Prices are those of :mod:`..lines.pairs`, as if all of a stage's neighbours were on other ranks.
    """

    def __init__(self, problem: Problem, sets: Sequence[int]) -> None:
        self.problem, self.n = problem, len(sets)
        n_items = len(problem.items)
        n_bytes = n_items // 8 + 1
        rows = np.frombuffer(b"".join(s.to_bytes(n_bytes, "little") for s in sets), dtype=np.uint8)
        bits = np.unpackbits(rows.reshape(self.n, n_bytes), axis=1, bitorder="little")
        none, loads = np.zeros(n_items, dtype=bool), Loads(problem)
        layer = loads.layer(Downsets(none, np.arange(n_items), bits[:, :n_items].astype(bool)))
        self.holds, self.work = layer.downsets.rows, layer.work
        held = {links: loads.held(links, layer, layer) for links in {s.links for s in problem.stages}}
        self.moving = {links: _whole_numbers(each.moving) for links, each in held.items()}
        any_held = held[problem.stages[0].links]
        self.within = any_held.may_be
        times = any_held.forward, any_held.backward, any_held.sync
        self.forward, self.backward, self.sync = map(_whole_numbers, times)
        bytes_of = any_held.bytes_of or (np.zeros((self.n, self.n)),) * 5
        self.bytes_of = tuple(map(_whole_numbers, bytes_of))
        freed = layer.downsets.sums(np.array([freed_bytes(i.blocks) for i in problem.items], dtype=np.int64))
        self.freed = freed[None, :] - freed[:, None]
        self.nets = [n for n in problem.nets if n.send_ns or n.receive_ns or n.n_bytes or n.sent_bytes]
        self.makes = self.holds[:, [n.producer for n in self.nets]]
        self.takes = self._counts([n.consumers for n in self.nets])
        self.touches = self._counts([s.items for s in problem.shares])

    def _counts(self, groups: Sequence[Sequence[int]]) -> Array:
        """How many of each group's items each downset holds."""
        columns = [self.holds[:, list(group)].sum(axis=1) for group in groups]
        return np.array(columns, dtype=np.int64).reshape(len(groups), self.n).T

    def may_hold(self, s: int) -> Bits:
        """The pairs that stage ``s`` may hold: those of ``within`` whose items' windows have it."""
        barred = [not first <= s <= last for first, last in self.problem.windows]
        count = self.holds @ np.array(barred, dtype=np.int64)
        return np.asarray(self.within & (count[:, None] == count[None, :]))

    def together(
        self, links: Sequence[tuple[int, int]], a: tuple[int, Array], b: tuple[Array, Array]
    ) -> tuple[Array, ...]:
        """What an earlier and a later span on one rank save (ends of a × b): what each moves, what each
        synchronises, bytes held once.

        ``a`` is its start and its ends, ``b`` pairs of start and end. Values between the two cost nothing,
        and neither does a share that no one else holds.
        """
        start, ends = a
        shape = len(ends), len(b[0])
        net_a, net_b, sync_a, sync_b, bytes_once = (np.zeros(shape, dtype=np.int64) for _ in range(5))
        made = self.makes[ends] & ~self.makes[start]
        taken = self.takes[b[1]] - self.takes[b[0]]
        both = np.flatnonzero(made.any(axis=0) & (taken > 0).any(axis=0))
        if len(both):
            made, taken = made[:, both], taken[:, both]
            nets = [self.nets[n] for n in both]
            net_b += _product(made, taken > 0, [n.prices_ns(links[-1])[1] for n in nets])
            inside = self.takes[np.ix_(ends, both)] - self.takes[start, both]
            sizes, sends = [len(n.consumers) for n in nets], [n.prices_ns(links[0])[0] for n in nets]
            net_a += _whole(inside, taken, made, sizes, sends)
        held_a = self.touches[ends] - self.touches[start]
        held_b = self.touches[b[1]] - self.touches[b[0]]
        both = np.flatnonzero((held_a > 0).any(axis=0) & (held_b > 0).any(axis=0))
        if len(both):
            held_a, held_b = held_a[:, both], held_b[:, both]
            shares = [self.problem.shares[x] for x in both]
            sizes, prices = [len(s.items) for s in shares], [s.sync_ns for s in shares]
            sync_a = _whole(held_a, held_b, held_a > 0, sizes, prices)
            sync_b = _product(held_a > 0, held_b > 0, prices)
            bytes_once += _product(held_a > 0, held_b > 0, [s.static_bytes * s.tied for s in shares])
        return net_a, net_b, sync_a, sync_b, bytes_once

    def loads(
        self, stages: Sequence[int], a: tuple[int, Array], b: tuple[Array, Array]
    ) -> tuple[Array, Bits]:
        """The least load of a rank whose stages hold spans of ``a`` and ``b``; HUGE where memory is short.

        Second, where that is a bound only: blocks that must be computed again are taken to cost nothing.
        """
        p, stage = self.problem, self.problem.stages[stages[0]]
        links = [p.stages[s].links for s in stages]
        saved_a, saved_b, sync_a, sync_b, bytes_once = self.together(links, a, b)
        work = [self._work(stage, *span) for span in (a, b)]
        moving = (
            self.moving[links[0]][a][:, None] - saved_a,
            self.moving[links[-1]][b][None, :] - saved_b,
        )
        sync = self.sync[a][:, None] - sync_a, self.sync[b][None, :] - sync_b
        best = np.full(saved_a.shape, HUGE, dtype=np.int64)
        bound_only: Bits = np.full(saved_a.shape, p.has_blocks)
        for again in _recomputing(p.recompute, len(stages), p.has_blocks):
            total = np.zeros_like(best)
            for (forward, both), row, moved, synced, more in zip(
                work, _SIDES, moving, sync, again, strict=True
            ):
                own = (both + forward * (more is True))[row]
                total = total + stage_ns(own, moved, synced, p.overlap)
            if p.has_memory:
                fits = self._fits(stages, a, b, bytes_once, again)
                bound_only &= ~fits | any(again) | (None in again)
                total = np.where(fits, total, HUGE)
            best = np.minimum(best, total)
        return best, bound_only

    def _work(self, stage: Stage, start: int | Array, end: Array) -> tuple[Array, Array]:
        forward = scaled(self.forward[start, end], stage.speed)
        return forward, forward + scaled(self.backward[start, end], stage.speed)

    def _fits(
        self,
        stages: Sequence[int],
        a: tuple[int, Array],
        b: tuple[Array, Array],
        bytes_once: Array,
        again: Sequence[bool | None],
    ) -> Bits:
        stage, total = self.problem.stages[stages[0]], -bytes_once
        kept: list[Array] = []
        acting: list[Array] = []
        spans: tuple[Span, Span] = (a, b)
        for span, row, more in zip(spans, _SIDES, again, strict=True):
            static, saved, workspace, received, sent = (part[span][row] for part in self.bytes_of)
            kept.append(received if more else saved - self.freed[span][row] if more is None else saved)
            acting.append(workspace + saved * (more is True))
            total = total + memory_bytes(stage.in_flight, static, 0, 0, received, sent)[0]
        peak = np.zeros_like(total)
        for alive, x in self.problem.moments_of(stage.rank):
            # a rank of one stage has no second; its span is empty
            at_once = acting[x] + sum(n * k for n, k in zip(alive, kept, strict=False))
            peak = np.maximum(peak, at_once)
        return np.asarray(total + peak <= stage.limit_bytes)


def _whole_numbers(table: npt.NDArray[Any]) -> Array:
    return np.asarray(np.rint(table), dtype=np.int64)


def _product(a: Bits, b: Bits, weights: Sequence[int]) -> Array:
    out = (a * np.array(weights, dtype=np.float64)) @ b.T.astype(np.float64)
    return np.asarray(np.rint(out), dtype=np.int64)


def _whole(
    held_a: Array, held_b: Array, counts: Bits, of_each: Sequence[int], price_ns: Sequence[int]
) -> Array:
    """Σ price of the values or shares that both spans touch and no other stage does."""
    sizes, prices = np.array(of_each), np.array(price_ns, dtype=np.float64)
    out = np.zeros((len(held_a), len(held_b)))
    for held in np.unique(held_a[counts]):
        of = np.flatnonzero((sizes > held) & (prices > 0))
        a = (held_a[:, of] == held) & counts[:, of]
        some = a.any(axis=0)
        rest = held_b[:, of[some]] == sizes[of[some]] - held
        out += (a[:, some] * prices[of[some]]) @ rest.T.astype(np.float64)
    return np.asarray(np.rint(out), dtype=np.int64)


def _recomputing(choice: str, n_stages: int, has_blocks: bool) -> list[tuple[bool | None, bool | None]]:
    """Whether the first and the second stage recompute, in each way that may be chosen; None: only blocks."""
    if choice != "auto":
        return [(choice == "always",) * 2]
    ways: tuple[bool | None, ...] = (False, None, True) if has_blocks else (False, True)
    return list(itertools.product(ways, ways if n_stages > 1 else (False,)))
