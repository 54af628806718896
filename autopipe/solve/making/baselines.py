"""The splits people make by hand: equal counts of layers, equal parameters, or equal weights of their own.

They order nothing and prove nothing; ``search`` simulates them beside its own and never returns worse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...arguments import number
from ...errors import InputError
from ...graph import Op, OpGraph
from ..definition.problem import HUGE, Array, Problem
from ..lines.orders import pinned

__all__ = ["by_weight", "weights_of"]

Weigh = Callable[[Op], float]

_HEAVIEST = 1e30
_FINE = 1 << 40
"""Weights are told apart to this part of their sum."""


def weights_of(graph: OpGraph, problem: Problem, balance: str | Weigh) -> tuple[float, ...]:
    """Each item's weight: its layers counted (``uniform``), their parameters' elements, or a callable's sum.

    A layer is an op that holds parameters, as a person who cuts by hand counts them; a graph without any
    counts every op.
    """
    if balance == "uniform":
        layers = [float(sum(bool(graph.by_name[op].parameters) for op in i.ops)) for i in problem.items]
        return tuple(layers if any(layers) else [float(len(i.ops)) for i in problem.items])
    if balance == "parameters":
        seen: set[str] = set()
        return tuple(sum(_fresh_parameters(graph, op, seen) for op in i.ops) for i in problem.items)
    if not callable(balance):
        raise InputError(
            f"balance {balance!r} is unknown; use 'cost', 'parameters', 'uniform' or a callable of an op"
        )
    return tuple(sum(_weight(balance, graph.by_name[op]) for op in i.ops) for i in problem.items)


def _weight(balance: Weigh, op: Op) -> float:
    try:
        weight = balance(op)
    except Exception as error:
        raise InputError(
            f"balance raises {type(error).__name__} for op {op.name!r}: {error}; it is called with each op "
            "of the graph (autopipe.graph.Op) and gives its weight, a number"
        ) from error
    weight = int(weight) if isinstance(weight, bool) else weight
    return number(f"the weight that balance gave op {op.name!r}", weight, most=_HEAVIEST)


def _fresh_parameters(graph: OpGraph, op: str, seen: set[str]) -> float:
    """Elements of the op's parameters, each storage counted at its first user."""
    total = 0
    for name in graph.by_name[op].parameters:
        p = graph.parameter[name]
        if p.name not in seen:
            seen.add(p.name)
            total += p.numel
    return float(total)


def by_weight(problem: Problem, weights: Sequence[float]) -> tuple[int, ...] | None:
    """The assignment of items, in order, whose largest stage weight is least; None where none meets the pins.

    Items that pins hold to earlier stages come first (:func:`pinned`). O(stages · items · log items).
    """
    total = sum(weights) or 1.0
    fine = [round(w / total * _FINE) for w in weights]
    found: list[tuple[int, int, dict[int, int]]] = []
    for order in dict.fromkeys(pinned(problem, range(len(fine)), fine)):
        first, last = ([f(v) for v in order] for f in (lambda v: problem.items[v].first, problem.last_of))
        stages = np.arange(problem.n_stages)
        earliest = np.searchsorted(np.minimum.accumulate(last[::-1])[::-1], stages, side="right")
        latest = np.searchsorted(np.maximum.accumulate(first), stages, side="right")
        real = [bool(problem.items[v].ops) for v in order]
        cut = _even([fine[v] for v in order], real, earliest, latest)
        if cut is not None:
            heaviest = int(max(np.bincount(cut, weights=[fine[v] for v in order])))
            found.append((heaviest, len(found), dict(zip(order, cut, strict=True))))
    return tuple(min(found)[2][v] for v in range(len(fine))) if found else None


def _even(
    weights: Sequence[int], real: Sequence[bool], earliest: Array, latest: Array
) -> tuple[int, ...] | None:
    """The least largest sum of runs with a real item each, every cut as early as that allows.

    A run ends between its ``earliest`` and its ``latest`` end. What is not real weighs nothing. From the last
    run back: what the runs after a cut weigh at most falls as it moves on, what the run before it weighs
    rises, so the best place is where the two meet.
    """
    n = len(weights)
    before, count = (np.concatenate([[0], np.cumsum(row, dtype=np.int64)]) for row in (weights, real))
    filled = np.searchsorted(count, count[:-1], side="right")
    rest = np.full(n + 1, HUGE, dtype=np.int64)
    rest[n] = 0
    choices = []
    for s in reversed(range(len(latest))):
        first, last = int(earliest[s]), min(int(np.flatnonzero(rest < HUGE)[-1]), int(latest[s]))
        if first > last:
            return None
        ends, after = np.arange(first, last + 1), rest[first : last + 1]
        least = np.maximum(filled, first)
        meet = first + np.searchsorted(before[ends] - after, before[:-1], side="left")
        late = np.maximum(np.minimum(meet, last), least).clip(max=last)
        early = np.maximum(late - 1, least).clip(max=last)
        values = [np.maximum(before[end] - before[:-1], rest[end]) for end in (late, early)]
        same = first + np.searchsorted(-after, -rest[early], side="left")
        choices.append(np.where(values[1] <= values[0], np.maximum(same, least), late))
        rest = np.append(np.where(least <= last, np.minimum(*values), HUGE), HUGE)
        if rest[0] >= HUGE:
            return None
    stage_of: list[int] = []
    for s, choice in enumerate(reversed(choices)):
        stage_of += [s] * (int(choice[len(stage_of)]) - len(stage_of))
    return tuple(stage_of)
