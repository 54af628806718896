"""Schedules as text grids: along time for people, or with the faults of a broken one marked.

Real times are drawn by ``simulator``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .actions import Schedule, StageTimes
from .clock import Edges, run

__all__ = ["draw", "draw_faults"]

AROUND = 6
"""Actions shown on either side of the first fault of a long row."""


def draw(schedule: Schedule) -> str:
    """A column per time unit with F = I = W = 1 and B = 2, a row per rank; idle units are dots.

    >>> from autopipe.schedule import build
    >>> print(draw(build("1f1b", 2, 2, 3)))
    rank 0  0F0 0F1  .   .  0B0 0B0 0F2 0B1 0B1  .  0B2 0B2
    rank 1   .  1F0 1B0 1B0 1F1 1B1 1B1 1F2 1B2 1B2  .   .
    """
    clock = run(schedule, (StageTimes(1.0, 2.0, 1.0, 1.0),) * schedule.n_stages, Edges.of(schedule))
    length = round(max((row[-1] for row in clock.ends_s if row), default=0.0))
    rows = []
    for actions, starts, ends in zip(schedule.actions, clock.starts_s, clock.ends_s, strict=True):
        cells = ["."] * length
        for a, start, end in zip(actions, starts, ends, strict=True):
            cells[round(start) : round(end)] = [str(a)] * round(end - start)
        rows.append(cells)
    return _grid(rows)


def draw_faults(schedule: Schedule, faults: Collection[tuple[int, int]]) -> str:
    """The actions in order, those at (rank, index) between > and <; long rows only around the first."""
    marked = set(faults)
    first = min((i for _, i in marked if i >= 0), default=0)
    low, high = max(0, first - AROUND), first + AROUND + 1
    rows = []
    for r, actions in enumerate(schedule.actions):
        cells = [f">{a}<" if (r, i) in marked else str(a) for i, a in enumerate(actions)]
        before, after = ["…"] * (low > 0), ["…"] * (len(cells) > high)
        rows.append([*before, *cells[low:high], *after])
    return _grid(rows)


def _grid(rows: Sequence[Sequence[str]]) -> str:
    width = max((len(cell) for row in rows for cell in row), default=1)
    margin = len(f"rank {len(rows) - 1}")
    lines = []
    for r, row in enumerate(rows):
        cells = " ".join(cell.center(width) for cell in row)
        lines.append(f"{f'rank {r}'.ljust(margin)}  {cells}".rstrip())
    return "\n".join(lines)
