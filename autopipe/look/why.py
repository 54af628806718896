"""Why each cut is where it is, as text.

The reasons themselves are left to ``solve``.
"""

from __future__ import annotations

from ..costs import CostTable
from ..graph import OpGraph
from ..plans import Plan
from .table import nbytes, seconds

__all__ = ["why"]


def why(plan: Plan, graph: OpGraph | None = None, costs: CostTable | None = None) -> str:
    """Each cut with the loads on both sides and what crosses it."""
    lines = [_cut(plan, s) for s in range(plan.n_stages - 1)]
    return "\n".join(lines) or "One stage: there is no cut."


def _cut(plan: Plan, s: int) -> str:
    left, right = plan.stages[s], plan.stages[s + 1]
    crossing = [b for b in plan.boundaries if b.source <= s < max(b.destinations)]
    size = nbytes(sum(b.n_bytes for b in crossing))
    names = ", ".join(b.value for b in crossing[:4]) + (" …" if len(crossing) > 4 else "")
    loads = f"{seconds(left.seconds)} | {seconds(right.seconds)}"
    return f"cut {s}|{s + 1}: loads {loads}; {size} cross ({names or 'nothing'})"
