"""Why each cut is where it is, as text: the loads on both sides, what crosses, what a move would cost.

Finding the cut is left to ``solve``. Moves are judged by compute alone: what they would change about
communication and memory is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..costs import CostTable
from ..plans import Plan, StagePlan
from .table import nbytes, percent, seconds

__all__ = ["cut_reasons"]

LEAST_MOVE = 0.005
"""Of a stage's load: ops are moved together with the glue beside them until that much moves."""


def cut_reasons(plan: Plan, costs: CostTable | None = None) -> tuple[str, ...]:
    """A few lines per cut; with the op costs, also what moving it one op either way would cost."""
    return tuple(_cut(plan, s, costs) for s in range(plan.n_stages - 1))


def _cut(plan: Plan, s: int, costs: CostTable | None) -> str:
    left, right = plan.stages[s], plan.stages[s + 1]
    crossing = [b for b in plan.boundaries if b.source <= s < max(b.destinations)]
    size = nbytes(sum(b.n_bytes for b in crossing))
    names = ", ".join(b.value for b in crossing[:4]) + (" …" if len(crossing) > 4 else "")
    lines = [
        f"cut {s}|{s + 1}: loads {seconds(left.seconds)} | {seconds(right.seconds)}; "
        f"{size} cross ({names or 'nothing'})"
    ]
    if costs is not None:
        lines.append(_move(plan, left, right, reversed(_own(left)), costs))
        lines.append(_move(plan, right, left, _own(right), costs))
    return "\n".join(lines)


def _own(stage: StagePlan) -> tuple[str, ...]:
    clones = set(stage.clones)
    return tuple(op for op in stage.ops if op not in clones)


def _move(plan: Plan, source: StagePlan, target: StagePlan, ops: Iterable[str], costs: CostTable) -> str:
    """What the slowest stage would be if the ops nearest the cut changed sides."""
    speeds = [device.speed for device in plan.cluster.devices]
    moved = 0.0
    names: list[str] = []
    for op in ops:
        moved += costs[op].paced.seconds / speeds[source.rank]
        names.append(op)
        if moved > LEAST_MOVE * source.seconds:
            break
    loads = {s.index: s.seconds for s in plan.stages}
    before = max(loads.values())
    loads[source.index] -= moved
    loads[target.index] += moved * speeds[source.rank] / speeds[target.rank]
    change = max(loads.values()) / before - 1 if before else 0.0
    what = names[-1] if len(names) == 1 else f"{names[-1]} and {len(names) - 1} beside it"
    verdict = f"{percent(change)} slower" if change > 5e-4 else "no slower by compute alone"
    if change < -5e-4:
        verdict = f"{percent(-change)} faster by compute alone"
    where = f"to stage {target.index}: slowest stage {seconds(max(loads.values()))}"
    return f"    {what} ({seconds(moved)}) {where}, {verdict}"
