"""Finds every fault of a schedule at once and draws where they are.

Generating schedules without faults is left to ``templates`` and ``list_scheduling``.
"""

from __future__ import annotations

import collections

from ..errors import ScheduleError
from .actions import Action, Schedule, may_overlap, ordered
from .drawing import draw_faults

__all__ = ["check", "in_flight"]


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most microbatches alive at once: min(S − s, M) for 1F1B, M for GPipe, 0 forward-only.

    >>> from autopipe.schedule import build
    >>> in_flight(build("1f1b", 4, 4, 8))
    (4, 3, 2, 1)
    """
    return schedule.in_flight


def check(schedule: Schedule) -> None:
    """Raise :class:`ScheduleError` with every fault and the schedule drawn with the faults marked.

    A sound schedule runs each (stage, microbatch) forward once, and backward once (B, or I and then W)
    unless it is forward-only; on the rank its stage is placed on; F before B and I, I before W; and no
    rank waits for one that waits for it. Linear in the actions.
    """
    faults = _faults(schedule)
    if not faults:
        return
    shown = "\n".join(f"  {text}" for text, _, _ in faults[:20])
    more = f"\n  and {len(faults) - 20} more" if len(faults) > 20 else ""
    grid = draw_faults(schedule, [(rank, i) for _, rank, i in faults])
    count = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
    raise ScheduleError(f"schedule {schedule.name!r} has {count}:\n{shown}{more}\n{grid}")


def _faults(schedule: Schedule) -> list[tuple[str, int, int]]:
    """(text, rank, index in the rank's row) of each fault; index −1 where nothing stands to be marked."""
    faults: list[tuple[str, int, int]] = []
    seen: dict[tuple[int, int], dict[str, tuple[int, int]]] = collections.defaultdict(dict)
    for r, row in enumerate(schedule.actions):
        for i, a in enumerate(row):
            text = _misplaced(schedule, a, r) or _out_of_turn(a, seen[a.stage, a.microbatch])
            if text:
                faults.append((text, r, i))
            seen[a.stage, a.microbatch].setdefault(a.kind, (r, i))
            if a in schedule.overlapped and not (i and may_overlap(row[i - 1], a)):
                faults.append(
                    (f"{a} cannot overlap what is before it: an F of another microbatch must be", r, i)
                )
    faults += _missing(schedule, seen)
    if not faults:
        for r, i in ordered(schedule)[1].items():
            a = schedule.actions[r][i]
            faults.append((f"rank {r} waits for ever before {a}: what it needs is behind it elsewhere", r, i))
    return faults


def _misplaced(schedule: Schedule, a: Action, rank: int) -> str | None:
    if not 0 <= a.stage < schedule.n_stages:
        return f"rank {rank}: {a} is of stage {a.stage}, there are {schedule.n_stages}"
    if not 0 <= a.microbatch < schedule.n_microbatches:
        return f"rank {rank}: {a} is of microbatch {a.microbatch}, there are {schedule.n_microbatches}"
    if schedule.placement[a.stage] != rank:
        return f"rank {rank}: {a} belongs on rank {schedule.placement[a.stage]}"
    return None


def _out_of_turn(a: Action, seen: dict[str, tuple[int, int]]) -> str | None:
    if a.kind in seen:
        return f"{a} runs twice"
    if a.kind == "B" and ("I" in seen or "W" in seen):
        return f"{a} repeats what its I or W already did"
    if a.kind in "IW" and "B" in seen:
        return f"{a} repeats what its B already did"
    if a.kind != "F" and "F" not in seen:
        return f"{a} runs before its F"
    if a.kind == "W" and "I" not in seen:
        return f"{a} runs before its I"
    return None


def _missing(
    schedule: Schedule, seen: dict[tuple[int, int], dict[str, tuple[int, int]]]
) -> list[tuple[str, int, int]]:
    faults = []
    for s, rank in enumerate(schedule.placement):
        for m in range(schedule.n_microbatches):
            kinds = seen.get((s, m), {})
            if "F" not in kinds:
                faults.append((f"rank {rank}: {s}F{m} is missing", rank, -1))
            if not schedule.has_backward or "B" in kinds:
                continue
            if "I" not in kinds and "W" not in kinds:
                faults.append((f"rank {rank}: {s}B{m} is missing", rank, -1))
            elif ("I" in kinds) != ("W" in kinds):
                there, lost = ("I", "W") if "I" in kinds else ("W", "I")
                faults.append(
                    (f"rank {rank}: {s}{lost}{m} is missing, {s}{there}{m} is there", *kinds[there])
                )
    return faults
