"""What one rank does in a step, as a flat list: receive, run an action, send.

Which messages cross and in which order is left to ``schedule``; carrying it out to ``executor``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal

from ...errors import InputError
from ...plans import Plan
from ...schedule import (
    Action,
    Compute,
    Message,
    Schedule,
    Send,
    StageTimes,
    Transfer,
    build,
    check,
    wire_order,
)
from ...schedule.actions import KINDS, may_overlap
from ...simulator import plan_schedule
from ..wire.boundary import Edge

__all__ = ["Program", "ProgramStep", "compile_program", "pick_schedule"]


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramStep:
    """One step: run ``action``, or move the ``message`` to or from rank ``peer``."""

    kind: Literal["run", "send", "recv"]
    action: Action | None = None
    message: Message | None = None
    peer: int = -1

    def __str__(self) -> str:
        if self.kind == "run":
            return str(self.action)
        return f"{self.kind} {self.message} {'to' if self.kind == 'send' else 'from'} rank {self.peer}"


Program = tuple[ProgramStep, ...]


def pick_schedule(plan: Plan, wanted: str | Schedule | None, n_microbatches: int) -> Schedule:
    """The schedule of a step with ``n_microbatches``: the plan's, or another that fits its placement.

    A given :class:`Schedule` for more microbatches loses the surplus ones; what remains is still valid.
    Raises :class:`InputError` when its placement is not the plan's, or it has too few microbatches.
    """
    if isinstance(wanted, Schedule):
        return _given(plan, wanted, n_microbatches)
    return plan_schedule(plan, wanted, n_microbatches)


def _given(plan: Plan, schedule: Schedule, n_microbatches: int) -> Schedule:
    if schedule.placement != plan.placement:
        raise InputError(
            f"schedule {schedule.name!r} places its stages on ranks {schedule.placement}, the plan on "
            f"{plan.placement}; plan again with this schedule"
        )
    if schedule.n_microbatches < n_microbatches:
        raise InputError(
            f"schedule {schedule.name!r} is for {schedule.n_microbatches} microbatches, the step has "
            f"{n_microbatches}; pass n_microbatches={schedule.n_microbatches} or less"
        )
    rows = tuple(tuple(a for a in row if a.microbatch < n_microbatches) for row in schedule.actions)
    pairs = {b for row in rows for a, b in itertools.pairwise(row) if may_overlap(a, b)}
    overlapped = schedule.overlapped & pairs
    return dataclasses.replace(schedule, n_microbatches=n_microbatches, actions=rows, overlapped=overlapped)


def forward_part(schedule: Schedule) -> Schedule:
    """The forward-only schedule on the same placement."""
    return build(
        "forward-only",
        schedule.n_ranks,
        schedule.n_stages,
        schedule.n_microbatches,
        placement=schedule.placement,
    )


def compile_program(
    schedule: Schedule, edges: Sequence[Edge], rank: int | None, times: Sequence[StageTimes] | None = None
) -> Program:
    """The steps of ``rank``, or, for None, all actions in one line that respects every dependency.

    ``times`` are the stages' predicted ones, the same on every rank, by which messages are put in order.
    Raises :class:`ScheduleError` when the schedule is malformed.
    """
    check(schedule)
    if rank is None:
        return tuple(
            ProgramStep("run", Action(code >> 2, KINDS[code & 3], m)) for _, code, m in schedule.order
        )
    transfers = [Transfer(e.source, e.destination, value=e.names[0]) for e in edges]
    wire = wire_order(schedule, transfers, times=times)
    steps = []
    for step in wire.programs[rank]:
        if isinstance(step, Compute):
            steps.append(ProgramStep("run", step.action))
        else:
            kind: Literal["send", "recv"] = "send" if isinstance(step, Send) else "recv"
            steps.append(ProgramStep(kind, message=step.message, peer=step.peer))
    return tuple(steps)
