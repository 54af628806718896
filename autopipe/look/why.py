"""Why each cut is where it is, as text.

The reasons themselves are left to ``solve``.
"""

from __future__ import annotations

from ..costs import CostTable
from ..graph import OpGraph
from ..plans import Plan
from .table import nbytes, seconds

__all__ = ["cut_reasons"]


def cut_reasons(plan: Plan, graph: OpGraph | None = None, costs: CostTable | None = None) -> tuple[str, ...]:
    """A line per cut: the loads on both sides and what crosses it."""
    return tuple(_cut(plan, s) for s in range(plan.n_stages - 1))


def _cut(plan: Plan, s: int) -> str:
    left, right = plan.stages[s], plan.stages[s + 1]
    crossing = [b for b in plan.boundaries if b.source <= s < max(b.destinations)]
    size = nbytes(sum(b.n_bytes for b in crossing))
    names = ", ".join(b.value for b in crossing[:4]) + (" …" if len(crossing) > 4 else "")
    loads = f"{seconds(left.seconds)} | {seconds(right.seconds)}"
    return f"cut {s}|{s + 1}: loads {loads}; {size} cross ({names or 'nothing'})"
