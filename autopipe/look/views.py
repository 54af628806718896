"""What each object is shown as: text on a terminal, HTML in a notebook, a page, a data frame.

Their tables are left to ``tables``, pictures to ``timeline_svg``, a plan's whole page to ``report``.
"""

from __future__ import annotations

import functools
import html as escape_
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..memory import memory_limits
from ..plans import Plan
from ..schedule import Schedule
from ..simulator import Report, StageTimes, Timeline, simulate, simulate_schedule
from . import diff_tables  # noqa: F401 (registers its tables)
from .mesh import Mesh, drawing
from .report import report
from .tables import headline, rank_table, tables
from .timeline_svg import gantt, memory

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["cell", "frame", "html", "page", "text"]

STYLE = (
    "<style>.autopipe table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:.4em 0}"
    ".autopipe{overflow-x:auto}"
    ".autopipe td,.autopipe th{padding:.15em .7em;text-align:left;white-space:nowrap}"
    ".autopipe .n{text-align:right}"
    ".autopipe caption{text-align:left;font-weight:600;padding:.3em .7em}"
    ".autopipe .note{opacity:.7;font-size:.85em;margin:.2em .7em}</style>"
)
NOTEBOOK_ROWS = 24
"""Table rows in a notebook cell; ``to_frame`` and ``to_html`` have them all."""


def text(item: Any) -> str:
    """The headline and the main table."""
    first, *rest = tables(item)
    small = [t for t in rest if len(t.rows) <= NOTEBOOK_ROWS]
    return "\n\n".join([headline(item), *(t.text() for t in (first, *small))])


def frame(item: Any) -> pd.DataFrame:
    """The main table's rows, unformatted; a timeline's are its events."""
    every = tables(item)
    return (every[-1] if isinstance(item, Timeline) else every[0]).frame()


@functools.singledispatch
def html(item: Any) -> str:
    """A notebook cell's view."""
    return cell(headline(item), [tables(item)[0].html(NOTEBOOK_ROWS)])


@html.register
def _(plan: Plan) -> str:
    main, *rest = tables(plan)
    more = "".join(t.html(NOTEBOOK_ROWS) for t in rest)
    folded = f"<details><summary>Boundaries, ties, alternatives</summary>{more}</details>" if more else ""
    return cell(headline(plan), [main.html(NOTEBOOK_ROWS), gantt(simulate(plan)), folded])


@html.register
def _(timeline: Timeline) -> str:
    pictures = [gantt(timeline), memory(timeline) if timeline.memory else ""]
    return cell(headline(timeline), [*pictures, rank_table(timeline).html(NOTEBOOK_ROWS)])


@html.register
def _(run: Report) -> str:
    drawn = gantt(run.predicted, run.timeline) if run.events else ""
    return cell(headline(run), [tables(run)[0].html(NOTEBOOK_ROWS), drawn])


@html.register
def _(schedule: Schedule) -> str:
    unit = StageTimes(1.0, 2.0, 1.0, 1.0)
    drawn = gantt(simulate_schedule(schedule, [unit] * schedule.n_stages))
    note = '<p class="note">Drawn with equal stages whose backward takes twice their forward.</p>'
    return cell(headline(schedule), [drawn, note])


@html.register
def _(mesh: Mesh) -> str:
    return cell(headline(mesh), [drawing(mesh), *(t.html(NOTEBOOK_ROWS) for t in tables(mesh))])


@functools.singledispatch
def page(item: Any, **context: Any) -> str:
    """A whole page; plans have the full report."""
    if context:
        raise TypeError(f"a {type(item).__name__}'s page takes no {', '.join(context)}")
    full = "".join(t.html() for t in tables(item))
    return _document(headline(item), html(item) + f"<details><summary>All rows</summary>{full}</details>")


@page.register
def _(plan: Plan, **context: Any) -> str:
    return report(plan, **context)


@page.register
def _(run: Report, **context: Any) -> str:
    other = {} if run.is_as_planned else {"timeline": run.predicted}
    return report(run.plan, measured=run, **other | context)


def plan_memory(plan: Plan) -> str:
    """A plan's predicted memory over time with its limits, as SVG."""
    return memory(simulate(plan), memory_limits(plan))


def cell(title: str, parts: Iterable[str]) -> str:
    """A notebook cell's view: a line, and parts under it."""
    line = f'<p style="margin:.3em .7em">{escape_.escape(title)}</p>'
    return f'{STYLE}<div class="autopipe">{line}{"".join(parts)}</div>'


def _document(title: str, body: str) -> str:
    style = (
        "<style>:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;margin:2rem}</style>"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width, initial-scale=1">'
        f'<title>{escape_.escape(title)}</title><link rel="icon" href="data:,">{style}</head>'
        f"<body>{body}</body></html>\n"
    )
