"""Why a plan's cuts are where they are: what moving each by one op would change, and what the bottleneck is.

Every move is priced like a plan: communication, ties and memory included, then simulated. Showing it is left
to the caller; what the plan itself says is in ``plans``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from ..costs import CostTable
from ..errors import PlanError
from ..graph import OpGraph
from ..memory import asked_limits
from ..plans import Plan
from ..simulator import plan_schedule, simulate
from ..units import format_seconds
from .compose import Source, lay_out
from .formulate import Settings, formulate
from .problem import HUGE, Problem

__all__ = ["Explanation", "Move", "explain"]


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """The ops beside a cut that would change sides, and the changes in seconds (positive: worse).

    ``cut`` is the stage before the cut. ``bottleneck_s`` is the change of the largest load of a rank per
    microbatch, ``step_s`` that of the simulated step. ``fits`` says whether memory would still do.
    """

    cut: int
    ops: tuple[str, ...]
    source: int
    target: int
    bottleneck_s: float
    step_s: float
    fits: bool

    def __str__(self) -> str:
        what = self.ops[0] if len(self.ops) == 1 else f"{self.ops[0]} and {len(self.ops) - 1} tied to it"
        changes = f"bottleneck {_signed(self.bottleneck_s)}, step {_signed(self.step_s)}"
        return f"{what} to stage {self.target}: {changes if self.fits else 'memory does not suffice'}"


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """The fullest stage, its dearest op, and for each cut the best move either way, where there is one."""

    bottleneck_stage: int
    bottleneck_op: str
    bottleneck_s: float
    moves: tuple[Move, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        head = (
            f"bottleneck: stage {self.bottleneck_stage}, {format_seconds(self.bottleneck_s)} per microbatch, "
            f"most of it in {self.bottleneck_op}"
        )
        return "\n".join([head, *(f"cut {m.cut}|{m.cut + 1}: {m}" for m in self.moves)])


def explain(plan: Plan, graph: OpGraph, costs: CostTable) -> Explanation:
    """What moving each cut of ``plan`` by one op would change, under the settings it was made with.

    Of the ops that may move, the one that leaves the least bottleneck is shown. Moves that pins, groups or
    data flow forbid, and those that empty a stage, are left out. Raises :class:`PlanError` when the plan is
    of another graph. O(cuts · ops beside them · (ops + edges)).
    """
    if plan.graph_digest != graph.digest:
        raise PlanError(
            f"the plan is of {plan.model} with graph {plan.graph_digest}, not of {graph.model} with graph "
            f"{graph.digest}; capture the model the plan was made for"
        )
    source = Source(graph, costs, plan.cluster, _settings(plan))
    problem = formulate(graph, costs, plan.cluster, plan_schedule(plan), source.settings)
    now = _assignment(plan, problem)
    before, step_s = problem.bottleneck(problem.loads(now)), _step_s(plan, source, problem, now)
    moves = []
    for s in range(plan.n_stages - 1):
        for here, there in ((s, s + 1), (s + 1, s)):
            found = min(_moved(problem, now, here, there), default=None)
            if found is None:
                continue
            after, v = found
            stage_of = _with(now, v, there)
            change = _step_s(plan, source, problem, stage_of) - step_s
            ops = problem.items[v].ops
            moves.append(
                Move(s, ops, here, there, (after % HUGE - before % HUGE) / 1e9, change, after < HUGE)
            )
    loads = [load.load_ns for load in problem.loads(now)]
    worst = max(range(plan.n_stages), key=loads.__getitem__)
    dearest = max(plan.stages[worst].ops, key=lambda op: costs[op].seconds)
    return Explanation(worst, dearest, loads[worst] / 1e9, tuple(moves))


def _settings(plan: Plan) -> Settings:
    """The settings that the plan was solved under, as far as they decide what it costs."""
    kept = plan.settings
    names = {f.name for f in dataclasses.fields(Settings)} - {"memory_limit", "together", "uncut"}
    return Settings(
        **{name: kept[name] for name in names if name in kept},
        together=tuple(tuple(group) for group in kept.get("together", ())),
        uncut=tuple(kept.get("uncut", ())),
        memory_limit=tuple(limit for limit in asked_limits(plan) if limit is not None),
        training=plan.schedule != "forward-only",
    )


def _assignment(plan: Plan, problem: Problem) -> tuple[int, ...]:
    """The stage of each item: that of its ops, the model's output in the last."""
    last = plan.n_stages - 1
    return tuple(plan.stages_of[i.ops[0]][0] if i.ops else last for i in problem.items)


def _moved(problem: Problem, now: Sequence[int], here: int, there: int) -> Iterator[tuple[int, int]]:
    """The bottleneck after each move of one item that is allowed, and the item."""
    beside = problem.after if there > here else problem.before
    for v, s in enumerate(now):
        if s != here or not problem.items[v].ops or any(now[u] == here for u in beside[v]):
            continue
        stage_of = _with(now, v, there)
        if problem.is_valid(stage_of):
            yield problem.bottleneck(problem.loads(stage_of)), v


def _with(now: Sequence[int], v: int, there: int) -> tuple[int, ...]:
    return (*now[:v], there, *now[v + 1 :])


def _step_s(plan: Plan, source: Source, problem: Problem, stage_of: Sequence[int]) -> float:
    layout = lay_out(source, problem, stage_of)
    changed = dataclasses.replace(plan, stages=layout.stages, boundaries=layout.boundaries, ties=layout.ties)
    return float(simulate(changed).step_s)


def _signed(change: float) -> str:
    return f"{'−' if change < 0 else '+'}{format_seconds(abs(change))}" if change else "unchanged"
