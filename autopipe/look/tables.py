"""The tables of every data type: the first is the main one, a headline says the rest in a line.

Importing this is what makes them known to :func:`tables` and :func:`headline`; pictures are left to
``timeline_svg``.
"""

from .generic import headline, ratio, tables
from .graph_tables import place, shape
from .plan_tables import boundary_table, candidate_table, certificate, stage_table, tie_table
from .run_tables import rank_table

__all__ = [
    "boundary_table",
    "candidate_table",
    "certificate",
    "headline",
    "place",
    "rank_table",
    "ratio",
    "shape",
    "stage_table",
    "tables",
    "tie_table",
]
