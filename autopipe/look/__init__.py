"""Seeing plans, costs, schedules and runs: tables, notebook views, pictures, the offline report.

What is shown is left to the rooms before; the command line to ``cli``.
"""

from .cut_reasons import cut_reasons
from .mesh import Mesh
from .report import report
from .table import Column, Table
from .tables import certificate, headline, tables
from .timeline_svg import gantt, memory
from .views import frame, html, page, plan_memory, text
from .watching import follow, watch

__all__ = [
    "Column",
    "Mesh",
    "Table",
    "certificate",
    "cut_reasons",
    "follow",
    "frame",
    "gantt",
    "headline",
    "html",
    "memory",
    "page",
    "plan_memory",
    "report",
    "tables",
    "text",
    "watch",
]
