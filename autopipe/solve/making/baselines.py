"""The splits people make by hand: equal counts of layers, equal parameters, or equal weights of their own.

They order nothing and prove nothing; ``search`` simulates them beside its own and never returns worse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...errors import InputError
from ...graph import Op, OpGraph
from ..definition.problem import Problem

__all__ = ["by_weight", "weights_of"]

Weigh = Callable[[Op], float]


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
    weights = tuple(sum(float(balance(graph.by_name[op])) for op in i.ops) for i in problem.items)
    if any(w < 0 for w in weights):
        raise InputError("balance gave a negative weight; weights are at least 0")
    return weights


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
    """The assignment of items, in order, whose largest stage weight is least; None where pins forbid all.

    Ties go to the earliest cuts that keep later stages at their least. O(items² · stages) at worst.
    """
    n, k = len(problem.items), problem.n_stages
    prefix = [0.0]
    for w in weights:
        prefix.append(prefix[-1] + w)
    best = [[float("inf")] * (n + 1) for _ in range(k + 1)]
    choice = [[0] * (n + 1) for _ in range(k)]
    best[k][n] = 0.0
    for s in range(k - 1, -1, -1):
        for i in range(n - 1, -1, -1):
            best[s][i], choice[s][i] = _best_end(problem, prefix, best[s + 1], s, i)
    if best[0][0] == float("inf"):
        return None
    stage_of, at = [0] * n, 0
    for s in range(k):
        stop = choice[s][at]
        stage_of[at:stop] = [s] * (stop - at)
        at = stop
    return tuple(stage_of)


def _best_end(
    problem: Problem, prefix: Sequence[float], rest: Sequence[float], s: int, i: int
) -> tuple[float, int]:
    least, end, has_op = float("inf"), i, False
    for j in range(i, len(problem.items)):
        item = problem.items[j]
        if not item.first <= s <= problem.last_of(j):
            break
        has_op = has_op or bool(item.ops)
        weight = prefix[j + 1] - prefix[i]
        if weight >= least:
            break
        if has_op and max(weight, rest[j + 1]) < least:
            least, end = max(weight, rest[j + 1]), j + 1
    return least, end
