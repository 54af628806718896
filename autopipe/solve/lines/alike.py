"""Items that are alike but for who takes their value: only how many are made before a cut matters.

The keys and values of every cross attention may be made any time after the encoder: too many downsets to
look at one by one. Where likes cost the same, take the same and are taken in a known order, they may as well
be made in that order if a stage pays for how many more it makes than it takes, or the other way round:
who makes more makes those that later stages are short of. Finding chains is left to ``exact``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Hashable, Sequence

import numpy as np

from ..definition.problem import Array, Problem

__all__ = ["Alike", "likes"]


@dataclasses.dataclass(frozen=True, slots=True)
class Alike:
    """Interchangeable items in the order of their takers, and what sending or receiving one costs."""

    items: tuple[int, ...]
    takers: tuple[int, ...]
    send_ns: int
    receive_ns: int

    def early(self, n_items: int) -> Array:
        """Per item what it adds to how many are made and not taken yet."""
        out = np.zeros(n_items, dtype=np.int64)
        np.add.at(out, list(self.items), 1)
        np.subtract.at(out, list(self.takers), 1)
        return out

    def settle(self, stage_of: list[int]) -> None:
        """Says who makes which, given how many each makes: a stage's own first, then what is short later."""
        n_stages = max(stage_of) + 1
        makes, takes = [0] * n_stages, [0] * n_stages
        for v, w in zip(self.items, self.takers, strict=True):
            makes[stage_of[v]] += 1
            takes[stage_of[w]] += 1
        short = deque[int]()
        missing = [max(0, takes[s] - makes[s]) for s in range(n_stages)]
        for v, w in zip(self.items, self.takers, strict=True):
            s = stage_of[v] = stage_of[w]
            if missing[s]:
                missing[s] -= 1
                short.append(v)
        for s in range(n_stages):
            for _ in range(makes[s] - takes[s]):
                stage_of[short.popleft()] = s


def likes(problem: Problem) -> tuple[Problem, Problem, tuple[Alike, ...]]:
    """A problem without memory with its likes in order, the same without the values they make, and the likes.

    Every chain of the problem has one in the first whose stages cost what the second says and what each stage
    makes and takes of the likes; every chain of the first, once settled, is one of the problem at that price.
    """
    groups: dict[Hashable, list[tuple[int, int, int]]] = {}
    made: list[list[int]] = [[] for _ in problem.items]
    taken: list[list[int]] = [[] for _ in problem.items]
    for n, net in enumerate(problem.nets):
        made[net.producer].append(n)
        for v in net.consumers:
            taken[v].append(n)
    for v, item in enumerate(problem.items):
        if len(made[v]) != 1 or problem.shares_of[v]:
            continue
        net = problem.nets[made[v][0]]
        if net.consumers != problem.after[v] or len(net.consumers) != 1:
            continue
        work = item.forward_ns, item.backward_ns, bool(item.ops), item.first, item.last
        key = work, net.send_ns, net.receive_ns, tuple(taken[v]), tuple(sorted(problem.before[v]))
        groups.setdefault(key, []).append((net.consumers[0], v, made[v][0]))
    found, edges, apart = [], list(problem.edges), set[int]()
    for group in groups.values():
        for row in _rows(sorted(group), problem):
            takers, items, nets = zip(*row, strict=True)
            net = problem.nets[nets[0]]
            found.append(Alike(items, takers, net.send_ns, net.receive_ns))
            edges += itertools.pairwise(items)
            apart.update(nets)
    ordered = dataclasses.replace(problem, edges=tuple(sorted(edges))) if found else problem
    kept = tuple(net for n, net in enumerate(problem.nets) if n not in apart)
    return ordered, dataclasses.replace(ordered, nets=kept), tuple(found)


def _rows(group: Sequence[tuple[int, int, int]], problem: Problem) -> list[list[tuple[int, int, int]]]:
    """Rows of at least two whose takers and items both come one after the other."""
    rows: list[list[tuple[int, int, int]]] = []
    for taker, v, net in group if len(group) > 1 else ():
        for row in rows:
            before, u, _ = row[-1]
            if u < v and problem.below[before] >> taker & 1:
                row.append((taker, v, net))
                break
        else:
            rows.append([(taker, v, net)])
    return [row for row in rows if len(row) > 1]
