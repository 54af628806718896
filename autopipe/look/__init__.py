"""Seeing plans, costs, schedules and runs: tables, notebook views, pictures, the offline report.

What is shown is left to the rooms before; the command line to ``cli``.
"""

from .mesh import Mesh
from .report import report
from .svg import gantt, memory
from .table import Column, Table
from .tables import certificate, headline, tables
from .views import frame, html, page, plan_memory, text
from .watching import follow, watch
from .why import cut_reasons

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
