"""Schedules in the CSV format of torch.distributed.pipelining: a row per rank, a cell per action.

Which schedules torch itself can run is left to torch: it wants whole stages on ranks and adds its own sends.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable

from ..arguments import brief
from ..errors import ScheduleError
from ..files import read_text, unreadable
from .actions import Action, Schedule, parse_action
from .validate import check

__all__ = ["from_csv", "to_csv"]

_COMMUNICATION = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
_MOST_BYTES = 1 << 28


def to_csv(schedule: Schedule) -> str:
    """Text that torch's ``_PipelineScheduleRuntime._load_csv`` reads as ``compute_only``.

    >>> from autopipe.schedule import build
    >>> print(to_csv(build("zb-h1", 2, 2, 2)), end="")
    0F0,0F1,0I0,0W0,0I1,0W1
    1F0,1I0,1F1,1I1,1W0,1W1
    """
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([_cells(schedule, row) for row in schedule.actions])
    return out.getvalue()


def _cells(schedule: Schedule, row: Iterable[Action]) -> list[str]:
    cells: list[str] = []
    for action in row:
        if action in schedule.overlapped:
            cells[-1] = f"({cells[-1]};{action})OVERLAP_F_B"
        else:
            cells.append(str(action))
    return cells


def from_csv(source: str | os.PathLike[str], *, name: str = "csv") -> Schedule:
    """A checked schedule from CSV text, or from the file at a path object.

    Empty cells (idle), sends, receives, and FSDP's unshards, reshards and reductions are left out: they
    follow from the rest. Overlapped pairs such as ``(0F1;3B2)OVERLAP_F_B`` become their parts in order, the
    second among the schedule's ``overlapped``.
    Raises :class:`ScheduleError` for a cell that is none of these and for an unsound schedule,
    :class:`StoreError` for a file that cannot be read.
    """
    parsed = [
        [_parse(cell.strip(), f"row {r + 1}, cell {i + 1}") for i, cell in enumerate(row)]
        for r, row in enumerate(_table(source))
    ]
    rows = [tuple(a for cell in row for a in cell) for row in parsed]
    overlapped = frozenset(a for row in parsed for cell in row for a in cell[1:])
    if not any(rows):
        raise ScheduleError("the schedule has no actions; a row per rank is written like 0F0,0F1,0B0,0B1")
    rank_of = {a.stage: r for r, row in reversed(list(enumerate(rows))) for a in row}
    microbatches = {a.microbatch for row in rows for a in row}
    for what, found in (("stage", set(rank_of)), ("microbatch", microbatches)):
        if max(found) >= len(found):
            missing = next(x for x in range(len(found) + 1) if x not in found)
            raise ScheduleError(f"no rank of the schedule runs {what} {missing}; they are numbered from 0")
    n_microbatches = len(microbatches)
    placement = tuple(rank_of[s] for s in range(len(rank_of)))
    schedule = Schedule(name, placement, n_microbatches, tuple(rows), overlapped)
    check(schedule)
    return schedule


def _table(source: str | os.PathLike[str]) -> list[list[str]]:
    try:
        text = source if isinstance(source, str) else read_text(source, _MOST_BYTES, "a schedule")
        return list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise unreadable("text" if isinstance(source, str) else source, error, "a schedule") from error


def _parse(cell: str, where: str) -> list[Action]:
    overlap = _OVERLAP.fullmatch(cell)
    texts = [text.strip() for text in overlap[1].split(";")] if overlap else [cell]
    return [_action(text, where) for text in texts if text and not _COMMUNICATION.fullmatch(text)]


def _action(text: str, where: str) -> Action:
    action = parse_action(text)
    if action is None:
        raise ScheduleError(
            f"{where}: cannot read {brief(text)}; an action is written like 2F0, 0I3, 1W2 or 3B1"
        )
    return action
