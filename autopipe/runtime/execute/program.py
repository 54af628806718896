"""What one rank does in a step, as a flat list: receive, run an action, send.

Which messages cross and in which order is left to ``schedule``; carrying it out to ``executor``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence
from typing import Literal

from ...errors import InputError
from ...memory import memory_limits, plan_memory, rank_memory, tied_bytes
from ...plans import Plan
from ...schedule import (
    BREADTH_FIRST,
    Action,
    Compute,
    Gather,
    Message,
    Schedule,
    Send,
    StageTimes,
    Transfer,
    build,
    check,
    gathers,
    wire_order,
)
from ...schedule.actions import KINDS, may_overlap
from ...simulator import plan_schedule, stage_times
from ..wire.boundary import Edge

__all__ = [
    "LOSS_WAITS",
    "MODEL_WAITS",
    "Program",
    "ProgramStep",
    "Waits",
    "compile_program",
    "forward_part",
    "has_room",
    "pick_schedule",
    "step_program",
]


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramStep:
    """One step: run ``action``, move the ``message`` to or from rank ``peer``, or ``gather`` weights."""

    kind: Literal["run", "send", "recv", "gather"]
    action: Action | None = None
    message: Message | None = None
    peer: int = -1
    gather: Gather | None = None

    def __str__(self) -> str:
        if self.kind in ("run", "gather"):
            return str(self.action or self.gather)
        return f"{self.kind} {self.message} {'to' if self.kind == 'send' else 'from'} rank {self.peer}"


Program = tuple[ProgramStep, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Waits:
    """What takes all microbatches at once in the last stage, in words, and the option that lets it not."""

    what: str
    unless: str


_NO_MATTER_BYTES = 1 << 32
MODEL_WAITS = Waits("the model mixes rows at its end", "mixed_rows='allow'")
LOSS_WAITS = Waits("loss_fn is called on the whole batch", "loss_on='microbatches'")


def pick_schedule(
    plan: Plan,
    wanted: str | Schedule | None,
    n_microbatches: int,
    *,
    waits: Waits | None = None,
    gives_way: bool = False,
) -> Schedule:
    """The schedule of a step with ``n_microbatches``: the plan's, or another that fits its placement.

    A given :class:`Schedule` for more microbatches loses the surplus ones; what remains is still valid.
    Where something ``waits`` for all of them, GPipe takes the place of a plan's schedule that does not, and
    of one asked for that ``gives_way``. Raises :class:`InputError` when the placement is not the plan's,
    microbatches are too few, or the schedule asked for does not wait.
    """
    if isinstance(wanted, Schedule):
        chosen = _given(plan, wanted, n_microbatches)
    else:
        chosen = plan_schedule(plan, wanted, n_microbatches)
    if waits is None or n_microbatches == 1 or chosen.waits_for_all:
        return chosen
    if wanted is None or gives_way:
        return plan_schedule(plan, BREADTH_FIRST["1f1b"], n_microbatches)
    raise InputError(
        f"{waits.what}, which waits for every microbatch, and schedule {chosen.name!r} goes backward in the "
        f"last stage before that; use {' or '.join(map(repr, BREADTH_FIRST.values()))}, n_microbatches=1, or "
        f"{waits.unless} to take each microbatch for a batch"
    )


def has_room(plan: Plan, schedule: Schedule, beside_bytes: int) -> bool:
    """Whether every rank has memory for a schedule, the last stage's for so much ``beside_bytes`` too.

    Where a limit is not known, for so much that it is no matter.
    """
    limits = memory_limits(plan)
    if limits[plan.placement[-1]] is None and beside_bytes > _NO_MATTER_BYTES:
        return False
    found = rank_memory(schedule, plan_memory(plan), tied_bytes(plan))
    needs = [memory.total_bytes for memory in found]
    needs[plan.placement[-1]] += beside_bytes
    return all(limit is None or need <= limit for need, limit in zip(needs, limits, strict=True))


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


def step_program(
    plan: Plan,
    schedule: Schedule,
    edges: Sequence[Edge],
    rank: int | None,
    *,
    one_piece: Collection[int],
    sharded: Sequence[int],
    most_whole: int | None,
) -> Program:
    """The steps of ``rank``, or of all for None, in a call that a schedule is for.

    What runs as no stage of its plan's, at the end of the model, is not in it. ``one_piece`` are stages whose
    backward cannot be split. ``sharded`` ones are gathered when they are needed, at most ``most_whole`` at a
    time.
    """
    known = all(s.forward_s for s in plan.stages)
    crossing = [edge for edge in edges if edge.destination < plan.n_stages]
    program = compile_program(schedule, crossing, rank, stage_times(plan) if known else None)
    program = with_whole_backwards(program, one_piece)
    return with_gathers(program, sharded, most_whole) if sharded else program


def with_whole_backwards(program: Program, stages: Collection[int]) -> Program:
    """The program with a whole backward in the place of each I of these stages, and without their Ws."""
    out = []
    for step in program:
        action = step.action
        if action is None or action.stage not in stages or action.kind not in "IW":
            out.append(step)
        elif action.kind == "I":
            out.append(dataclasses.replace(step, action=dataclasses.replace(action, kind="B")))
    return tuple(out)


def with_gathers(program: Program, sharded: Sequence[int], most: int | None) -> Program:
    """The program with what makes ``sharded`` stages whole in time, and lets them go."""
    row = [step.action for step in program if step.action is not None]
    *before, after = gathers(row, sharded, most)
    rest, out = iter(before), list[ProgramStep]()
    for step in program:
        if step.action is not None:
            out += [ProgramStep("gather", gather=g) for g in next(rest)]
        out.append(step)
    return (*out, *(ProgramStep("gather", gather=g) for g in after))


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
