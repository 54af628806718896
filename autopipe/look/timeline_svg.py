"""Timelines as inline SVG, for notebooks: the schedule as a Gantt chart and memory over time.

The zoomable views of the report are left to its scripts. Text takes the page's own colour, so both show on
light and on dark.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from ..schedule import Action
from ..simulator import Event, Timeline
from .colours import colour
from .table import nbytes, seconds

__all__ = ["gantt", "memory"]

WIDTH = 900
GUTTER = 56
AXIS = 20
OPACITY = {"F": 0.5, "B": 1.0, "I": 1.0, "W": 0.28}
MOST_RANKS = 64
"""Ranks drawn; a notebook cell with more says how many it left out."""


def gantt(timeline: Timeline, measured: Timeline | None = None) -> str:
    """The actions of every rank over time; measured ones, where given, in a thinner row below.

    Forward is pale, backward full, weight gradients faint; numbers are microbatches.
    """
    n = min(timeline.schedule.n_ranks, MOST_RANKS)
    height = 40 if measured is not None else 26
    end = max(timeline.step_s, measured.step_s if measured is not None else 0.0) or 1.0
    parts = [_rows(timeline.events, n, end, 0, height * (0.56 if measured is not None else 0.88), height)]
    if measured is not None:
        parts.append(_rows(measured.events, n, end, height * 0.58, height * 0.32, height))
    label = f"{timeline.schedule.name} schedule, {seconds(timeline.step_s)} per step {timeline.source}"
    if measured is not None:
        label += f", {seconds(measured.step_s)} measured (lower rows)"
    return _frame(label, n, timeline.schedule.n_ranks, height, end, "".join(parts))


def _rows(events: Iterable[Event], n: int, end: float, top: float, tall: float, height: float) -> str:
    """Rectangles of one set of actions; those thinner than a third of a pixel join their neighbour."""
    out: list[str] = []
    drawn = [-1.0] * n
    scale = (WIDTH - GUTTER - 8) / end
    for rank, action, start_s, end_s in sorted(events, key=lambda e: (e[0], e[2])):
        left, right = GUTTER + start_s * scale, GUTTER + end_s * scale
        if rank >= n or right < drawn[rank] + 0.35:
            continue
        drawn[rank] = right
        width = max(right - left - (0.8 if right - left > 3 else 0), 0.4)
        y = AXIS + rank * height + top
        title = f"{action} rank {rank}, {seconds(start_s)}–{seconds(end_s)}"
        fill, words = _look(action)
        out.append(
            f'<rect x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{tall:.1f}" {fill}>'
            f"<title>{title}</title></rect>"
        )
        if width > 9 * len(words) and tall > 11:
            out.append(
                f'<text x="{left + width / 2:.1f}" y="{y + tall / 2 + 3.5:.1f}" text-anchor="middle" '
                f'font-size="10" pointer-events="none">{words}</text>'
            )
    return "".join(out)


def _look(action: Action | str) -> tuple[str, str]:
    """How an event is filled, and the words on it."""
    if isinstance(action, str):
        return 'fill="currentColor" fill-opacity=".25"', action
    return f'fill="{colour(action.stage)}" fill-opacity="{OPACITY[action.kind]}"', str(action.microbatch)


def memory(timeline: Timeline, limits: Sequence[int | None] = ()) -> str:
    """Memory of every rank over time, with its limit as a dashed line where one is near."""
    n = min(timeline.schedule.n_ranks, MOST_RANKS)
    height = 44
    end = timeline.step_s or 1.0
    curves = [timeline.memory_over_time(rank) for rank in range(n)]
    peaks = [max((b for _, b in curve), default=0) for curve in curves]
    known = [x for x in limits if x is not None]
    peak = max([*peaks, 1])
    limit_known = max(known, default=peak)
    top = 1.1 * (limit_known if peak < limit_known < 4 * peak else peak)
    parts = []
    for rank, curve in enumerate(curves):
        floor = AXIS + (rank + 1) * height - 4
        limit = limits[rank] if rank < len(limits) else None
        parts.append(_curve(curve, floor, height - 10, top, end, rank))
        if limit is not None and limit <= top:
            y = floor - limit / top * (height - 10)
            line = f'<line x1="{GUTTER}" x2="{WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}"'
            parts.append(line + ' stroke="#c0392b" stroke-dasharray="5 3"/>')
        parts.append(f'<text x="{GUTTER + 4}" y="{floor - 5}" font-size="10">{nbytes(peaks[rank])}</text>')
    label = f"memory per rank over time, fullest {nbytes(max(peaks, default=0))}"
    return _frame(label, n, timeline.schedule.n_ranks, height, end, "".join(parts))


def _curve(
    curve: Sequence[tuple[float, float]], floor: float, tall: float, top: float, end: float, rank: int
) -> str:
    scale = (WIDTH - GUTTER - 8) / end
    points = [f"M{GUTTER},{floor:.1f}"]
    for t, b in curve:
        points.append(f"H{GUTTER + min(t, end) * scale:.1f}V{floor - b / top * tall:.1f}")
    points.append(f"H{WIDTH - 8}V{floor:.1f}Z")
    shade = f'fill="{colour(rank)}" fill-opacity=".25" stroke="{colour(rank)}"'
    return f'<path d="{"".join(points)}" {shade}/>'


def _frame(label: str, n: int, n_all: int, height: float, end: float, body: str) -> str:
    """The picture around the rows: rank names, a time axis, a name for screen readers."""
    tall = AXIS + n * height + (16 if n < n_all else 0)
    ticks = "".join(
        f'<text x="{GUTTER + (WIDTH - GUTTER - 8) * i / 5:.0f}" y="12" font-size="10" opacity=".7" '
        f'text-anchor="{("start", "middle", "end")[(i > 0) + (i == 5)]}">{seconds(end * i / 5)}</text>'
        for i in range(6)
    )
    every = max(1, n // 32)
    names = "".join(
        f'<text x="2" y="{AXIS + (r + 0.5) * height + 3:.0f}" font-size="11" opacity=".7">rank {r}</text>'
        for r in range(0, n, every)
    )
    more = (
        f'<text x="2" y="{tall - 3:.0f}" font-size="11">… and {n_all - n} more ranks</text>'
        if n < n_all
        else ""
    )
    name = html.escape(label)
    return (
        f'<svg role="img" aria-label="{name}" viewBox="0 0 {WIDTH} {tall:.0f}" width="100%" '
        f'style="max-width:{WIDTH}px;font-family:system-ui,sans-serif" fill="currentColor">'
        f"{ticks}{names}{body}{more}</svg>"
    )
