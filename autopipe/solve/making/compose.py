"""From an assignment of items to stages to what a plan says of it: stages, boundaries and ties.

Choosing the assignment is left to ``search``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from ...costs import OpCost
from ...plans import Boundary, StagePlan, Tie, crossing, shared
from ..definition.problem import Problem, StageLoad
from .source import Source

__all__ = ["Layout", "lay_out"]


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Stages, what crosses between them, and the parameters that several hold."""

    stages: tuple[StagePlan, ...]
    boundaries: tuple[Boundary, ...]
    ties: tuple[Tie, ...]


def lay_out(source: Source, problem: Problem, stage_of: Sequence[int], loads: Sequence[StageLoad]) -> Layout:
    """The plan's rows for an assignment of the problem's items, and what it loads. O(ops + edges)."""
    graph = source.graph
    home = {op: s for item, s in zip(problem.items, stage_of, strict=True) for op in item.ops}
    placed = _placed(source, home, [load.copies for load in loads])
    ops: list[list[str]] = [[] for _ in problem.stages]
    copied: list[list[str]] = [[] for _ in problem.stages]
    for op in graph.compute:
        for s in sorted(placed[op.name]):
            ops[s].append(op.name)
            if len(placed[op.name]) > 1:
                copied[s].append(op.name)
    stages_out = []
    for s, load in enumerate(loads):
        own = tuple(ops[s])
        totals = source.totals(own)
        speed = problem.stages[s].speed
        parts = _parts(totals.cost, source.settings.training)
        if load.blocks or load.recompute:
            # what is run again is so by a backward that is not split
            parts = load.backward_ns / 1e9 * speed, 0.0
        stages_out.append(
            StagePlan(
                s,
                problem.stages[s].rank,
                own,
                tuple(copied[s]),
                load.recompute,
                load.forward_ns / 1e9,
                load.backward_ns / 1e9,
                parts[0] / speed,
                parts[1] / speed,
                totals.held_bytes,
                totals.trained_bytes,
                load.kept_bytes,
                load.acting_bytes,
                problem.stages[s].in_flight,
                load.memory_bytes,
                tuple(block.ops for block in load.blocks),
                sum(block.held_bytes for block in load.blocks),
                totals.n_trained,
            )
        )
    return Layout(
        tuple(stages_out),
        _boundaries(source, placed, len(loads)),
        _ties(source, placed, [s.rank for s in problem.stages]),
    )


def _placed(source: Source, home: dict[str, int], copies: Sequence[Sequence[str]]) -> dict[str, set[int]]:
    """The stages that compute each op: its own, those that need a clone, those that compute it again."""
    graph = source.graph
    last = len(copies) - 1
    placed: dict[str, set[int]] = {op.name: set() for op in graph.ops}
    for op in reversed(graph.ops):
        if op.name in source.clones:
            for consumer in graph.consumers[op.name]:
                placed[op.name] |= placed[consumer]
            placed[op.name] = placed[op.name] or {0}
        else:
            placed[op.name] = {home.get(op.name, last)}
    if any(copies):
        made = source.copies
        for s, values in enumerate(copies):
            for op_name in {v for value in values for v in made[value]}:
                placed[op_name].add(s)
    return placed


def _parts(cost: OpCost, training: bool) -> tuple[float, float]:
    """Input and weight seconds of the backward that add up to all of it."""
    if not training:
        return 0.0, 0.0
    known = cost.backward_input_s + cost.backward_weight_s
    share = cost.backward_input_s / known if known else 1.0
    return cost.backward_s * share, cost.backward_s * (1 - share)


def _boundaries(source: Source, placed: dict[str, set[int]], n_stages: int) -> tuple[Boundary, ...]:
    training = source.settings.training
    return tuple(
        Boundary(op.name, min(placed[op.name]), there, source.sizes[op.name], op.requires_grad and training)
        for op, there in crossing(source.graph, placed, n_stages)
    )


def _ties(source: Source, placed: dict[str, set[int]], placement: Sequence[int]) -> tuple[Tie, ...]:
    out = []
    for p, stages in shared(source.graph, placed):
        ranks = {placement[s] for s in stages}
        seconds = source.cluster.all_reduce_s(p.bytes, ranks) if source.settings.training else 0.0
        mode: Literal["sync", "colocate"] = "sync" if len(ranks) > 1 else "colocate"
        out.append(Tie(p.name, p.names, stages, p.bytes, mode, seconds))
    return tuple(out)
