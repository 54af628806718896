"""A timeline as text: a line per rank, time to the right.

Pages and pictures are left to ``look``.
"""

from __future__ import annotations

from .timeline_data import TimelineData

__all__ = ["gantt"]

FILL = {"F": "▒", "B": "█", "I": "▓", "W": "░"}


def gantt(timeline: TimelineData, width: int = 100) -> str:
    """A line per rank and, below, what the shades mean; a microbatch's number stands where it fits."""
    scale = width / timeline.step_s if timeline.step_s else 0.0
    margin = len(f"rank {timeline.schedule.n_ranks - 1} ")
    lines = [timeline.summary]
    for rank in range(timeline.schedule.n_ranks):
        cells = [" "] * width
        for event in timeline.events_of(rank):
            _paint(cells, event.action, round(event.start_s * scale), round(event.end_s * scale))
        lines.append(f"rank {rank}".ljust(margin) + "".join(cells).rstrip())
    used = {str(a.kind) for row in timeline.schedule.actions for a in row}
    names = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
    legend = "  ".join(f"{FILL[k]} {names[k]}" for k in FILL if k in used)
    tail = "  ".join(f"{label[0]} {label}" for label in sorted({str(e.action) for e in timeline.tail}))
    return "\n".join([*lines, " " * margin + "  ".join(filter(None, (legend, tail)))])


def _paint(cells: list[str], action: object, start: int, end: int) -> None:
    label = str(getattr(action, "microbatch", ""))
    fill = FILL[action.kind] if label else str(action)[0]  # type: ignore[attr-defined]
    text = fill * (end - start)
    if label and len(label) < len(text):
        text = label + text[len(label) :]
    cells[start:end] = text
