"""The solver: which stage computes what, exactly, certified how far the largest load is from the least.

Capturing the graph and measuring its costs are left to ``tracing`` and ``measure``; building the stages of a
plan to ``stages``.
"""

from .chains import chain
from .definition.answer import Answer
from .definition.blocks import Block
from .definition.problem import Item, Net, Problem, Share, Stage
from .explain import Explanation, Move, explain
from .making.cases import SEVERAL_PER_RANK
from .search import solve, usual_time_s

__all__ = [
    "SEVERAL_PER_RANK",
    "Answer",
    "Block",
    "Explanation",
    "Item",
    "Move",
    "Net",
    "Problem",
    "Share",
    "Stage",
    "chain",
    "explain",
    "solve",
    "usual_time_s",
]
