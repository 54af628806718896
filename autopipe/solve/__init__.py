"""The solver: which stage computes what, exactly, certified how far the largest load is from the least.

Capturing the graph and measuring its costs are left to ``tracing`` and ``measure``; building the stages of a
plan to ``stages``.

``search`` tries each case (a schedule, counts, an order of ranks): ``answers`` has the best chain of stages
that ``chains`` finds for it, or for any order of its ranks, ``step`` the plan near it whose step simulates
fastest.

Where a change goes:

- a term of a stage's load or memory: ``definition.problem``, which every solver and bound is tested against
- an option of a solve: ``making.options``
- what a problem takes from graph, costs and cluster: ``making.formulate``; what is tried: ``making.cases``
- a first answer or a proof with one stage a rank: ``lines.intervals``, ``lines.exact``; with several:
  ``ranks.virtual``
- a lower bound: ``proof.bounds`` on loads, ``proof.step`` on the step; what memory leaves room for:
  ``proof.memory``
- words for why nothing fits: ``infeasible``
"""

from .answers import Known
from .chains import chain
from .definition.answer import Answer
from .definition.blocks import Block
from .definition.problem import Item, Net, Problem, Share, Stage
from .explain import Explanation, Move, explain
from .making.cases import SEVERAL_PER_RANK
from .making.options import CHECKS, options_of
from .search import check_room, room_bytes, solve, usual_time_s

__all__ = [
    "CHECKS",
    "SEVERAL_PER_RANK",
    "Answer",
    "Block",
    "Explanation",
    "Item",
    "Known",
    "Move",
    "Net",
    "Problem",
    "Share",
    "Stage",
    "chain",
    "check_room",
    "explain",
    "options_of",
    "room_bytes",
    "solve",
    "usual_time_s",
]
