"""Opens the one leaf that stands in the way of balance, plans again, and stops when that no longer helps.

Recording the opened graph is left to ``tracing``, solving to ``solve``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import nn

from ..costs import CostTable
from ..errors import CaptureError, InfeasibleError
from ..plans import Plan
from ..tracing import Capture

__all__ = ["Planned", "refine"]

TOLERANCE = 0.05
"""A bottleneck this far above the mean rank is balanced enough to leave blocks whole."""

MIN_GAIN = 0.02
"""Opening leaves must shorten the bottleneck by this much to be kept: whole blocks are easier to read."""

PATIENCE = 2
"""How many leaves may be opened in a row without such a gain."""

MAX_OPENED = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """A capture, what its ops cost, the plan made from them, and the leaves that were opened on the way."""

    capture: Capture
    costs: CostTable
    plan: Plan
    opened: tuple[str, ...] = ()


def refine(
    capture: Capture,
    cost: Callable[[Capture], CostTable],
    solve: Callable[[Capture, CostTable], Plan],
    *,
    may_open: bool = True,
) -> Planned:
    """Plan ``capture``; while one leaf keeps the bottleneck high, open it and plan again.

    A graph with too few ops for the stages asked for is opened until it can be cut. With ``may_open``
    false (costs that a caller gave hold for this graph alone) it is planned as it is.

    Raises :class:`InfeasibleError` when no leaf is left to open and there is still no plan.
    """
    best: Planned | None = None
    opened: tuple[str, ...] = ()
    closed: set[str] = set()
    idle = 0
    while True:
        costs = cost(capture)
        failure: InfeasibleError | None = None
        heavy_in: Plan | None = None
        try:
            heavy_in = plan = solve(capture, costs)
        except InfeasibleError as error:
            failure = error
        else:
            if best is None or _bottleneck_s(plan) < _bottleneck_s(best.plan) * (1 - MIN_GAIN):
                best, idle = Planned(capture, costs, plan, opened), 0
            else:
                idle += 1
            if not may_open or _is_balanced(plan) or idle >= PATIENCE:
                return best
        following = None
        if may_open and len(opened) < MAX_OPENED:
            following = _open_heaviest(capture, costs, heavy_in, closed)
        if following is None:
            if best is None:
                assert failure is not None
                raise failure
            return best
        capture, path = following
        opened = (*opened, path)


def _loads_s(plan: Plan) -> list[float]:
    """By rank, forward and backward of one microbatch through its stages."""
    loads = [0.0] * plan.n_ranks
    for stage in plan.stages:
        loads[stage.rank] += stage.seconds
    return loads


def _bottleneck_s(plan: Plan) -> float:
    return max(_loads_s(plan))


def _is_balanced(plan: Plan) -> bool:
    loads = _loads_s(plan)
    return max(loads) <= sum(loads) / len(loads) * (1 + TOLERANCE)


def _open_heaviest(
    capture: Capture, costs: CostTable, plan: Plan | None, closed: set[str]
) -> tuple[Capture, str] | None:
    """The capture with its costliest leaf (of the fullest rank, once there is a plan) opened."""
    names = {op.name for op in capture.ops.compute}
    if plan is not None:
        loads = _loads_s(plan)
        fullest = loads.index(max(loads))
        names = {op for stage in plan.stages if stage.rank == fullest for op in stage.ops}
    leaves = [op for op in capture.ops.compute if op.kind == "module" and op.name in names]
    for op in sorted(leaves, key=lambda op: -costs[op.name].seconds):
        if op.module_path in closed or _is_single(capture.model.get_submodule(op.module_path)):
            continue
        try:
            return capture.open(op.module_path), op.module_path
        except CaptureError:
            # a single op, or pinned closed by the caller
            closed.add(op.module_path)
    return None


def _is_single(module: nn.Module) -> bool:
    """Whether a leaf is one of torch's own layers without parts, which opens into a single call."""
    return type(module).__module__.startswith("torch.nn.modules") and not any(module.children())
