"""The plan: which stage and rank computes what, what crosses, what is tied, and what it should cost.

Making plans is left to ``solve``, building modules from them to ``stages``. Readable without torch or the
model.

Where a change goes: a field of a stage, a boundary or a tie to ``parts``, of the whole and its file to
``plan``; a setting that plans keep to ``settings``; what makes a plan contradict itself to ``faults``, or the
model's graph to ``between``; a figure that two plans are compared by to ``diff``.
"""

from .between import check_between, crossing, shared
from .diff import PlanDiff, rank_bytes
from .parts import Boundary, Bounds, Candidate, StagePlan, Tie
from .plan import Plan, check_plan

__all__ = [
    "Boundary",
    "Bounds",
    "Candidate",
    "Plan",
    "PlanDiff",
    "StagePlan",
    "Tie",
    "check_between",
    "check_plan",
    "crossing",
    "rank_bytes",
    "shared",
]
