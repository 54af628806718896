"""The splits people make by hand: equal counts of layers, equal parameters, or equal weights of their own.

They order nothing and prove nothing; ``search`` simulates them beside its own and never returns worse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ...arguments import number
from ...errors import InputError
from ...graph import Op, OpGraph
from ..definition.problem import Problem, Stage
from ..lines.intervals import best_chain

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
    weight = balance(op)
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
    """The assignment of items, in order, whose largest stage weight is least; None where pins forbid all."""
    total = sum(weights) or 1.0
    items = (
        dataclasses.replace(i, forward_ns=round(w / total * _FINE), backward_ns=0, blocks=())
        for i, w in zip(problem.items, weights, strict=True)
    )
    stages = tuple(Stage(s) for s in range(problem.n_stages))
    found = best_chain(Problem(tuple(items), (), (), (), stages), range(len(problem.items)))
    return found and found[1]
