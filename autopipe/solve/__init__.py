"""The solver: which stage computes what, exactly, with a certificate of how far from optimal it can be.

Capturing the graph and measuring its costs are left to ``tracing`` and ``measure``; building the stages of a
plan to ``stages``.
"""

from .blocks import Block
from .cases import SEVERAL_PER_RANK
from .chains import chain
from .exact import Answer
from .explain import Explanation, Move, explain
from .problem import Item, Net, Problem, Share, Stage
from .search import solve

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
]
