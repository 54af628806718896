"""The types every schedule is made of, and the dependencies between its actions.

Generating schedules is left to ``templates`` and ``list_scheduling``, finding their faults to ``validate``.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Literal, cast

from ..errors import ScheduleError
from ..shown import Shown

__all__ = ["Action", "Kind", "Schedule", "StageTimes", "Transfer", "parse_action"]

Kind = Literal["F", "B", "I", "W"]

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
"""The kinds in the order of their codes in :attr:`Schedule.order`."""
F, B, I, W = range(4)  # noqa: E741 - the field's letter for the input gradient


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Action:
    """One thing a rank does: forward (F), full backward (B), or its input (I) or weight (W) part.

    >>> str(Action(2, "F", 0))
    '2F0'
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclasses.dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one stage's actions on one microbatch; B may differ from I + W.

    Where neither part is known (both 0), each counts as half of B.
    """

    forward_s: float = 1.0
    backward_s: float = 2.0
    backward_input_s: float = 1.0
    backward_weight_s: float = 1.0

    @property
    def by_code(self) -> tuple[float, float, float, float]:
        """In the order of the action codes F, B, I, W."""
        i, w = self.backward_input_s, self.backward_weight_s
        if not i and not w:
            i = w = self.backward_s / 2
        return self.forward_s, self.backward_s, i, w

    def seconds(self, kind: Kind) -> float:
        """Of one action of the kind."""
        return self.by_code[KINDS.index(kind)]


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """What one stage sends another per microbatch: ``n_bytes`` forward, and back where differentiable.

    ``value`` names the op whose result it is, for labels; several transfers between the same two stages
    travel as one message.
    """

    source: int
    destination: int
    n_bytes: int = 0
    differentiable: bool = True
    value: str = ""


@dataclasses.dataclass(frozen=True)
class Schedule(Shown):
    """For each rank, its actions in order.

    Attributes
    ----------
    name: such as ``"1f1b"``.
    placement: the rank of each stage; ``len(placement)`` is the number of stages.
    n_microbatches: how many microbatches the step has, at least 1.
    actions: per rank, its actions in order.
    overlapped: those that need nothing of the action before them on their rank, an F, and are meant to run
        while it does (DualPipeV), where a device can; running them after it is as right.
    """

    name: str
    placement: tuple[int, ...]
    n_microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    overlapped: frozenset[Action] = frozenset()

    @property
    def n_stages(self) -> int:
        return len(self.placement)

    @property
    def n_ranks(self) -> int:
        return len(self.actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages a rank holds, in order."""
        return tuple(s for s, r in enumerate(self.placement) if r == rank)

    @functools.cached_property
    def has_backward(self) -> bool:
        """Whether any action is not a forward."""
        return any(a.kind != "F" for row in self.actions for a in row)

    @functools.cached_property
    def splits_backward(self) -> bool:
        """Whether any backward is split into its input and weight parts."""
        return any(a.kind in "IW" for row in self.actions for a in row)

    @functools.cached_property
    def waits_for_all(self) -> bool:
        """Whether the last stage begins to go backward after its last forward, as what mixes rows needs."""
        row = self.actions[self.placement[-1]]
        kinds = "".join(a.kind for a in row if a.stage == self.n_stages - 1)
        return not re.search("[BIW]F", kinds)

    @functools.cached_property
    def order(self) -> tuple[tuple[int, int, int], ...]:
        """Every action as (rank, 4 × stage + kind code, microbatch), each after all it depends on.

        Raises :class:`ScheduleError` where the ranks wait for one another. Linear in the actions.
        """
        order, stuck = ordered(self)
        if stuck:
            where = ", ".join(f"rank {r} at {self.actions[r][i]}" for r, i in stuck.items())
            raise ScheduleError(f"schedule {self.name!r} deadlocks: {where}; check() draws where")
        return tuple(order)

    @functools.cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Per stage, the most microbatches between F and B (or W) at once; 0 in a forward-only schedule."""
        alive, peak = [0] * self.n_stages, [0] * self.n_stages
        for row in self.actions:
            for a in row:
                if a.kind == "F":
                    alive[a.stage] += 1
                    peak[a.stage] = max(peak[a.stage], alive[a.stage])
                elif a.kind != "I":
                    alive[a.stage] -= 1
        return tuple(peak) if self.has_backward else (0,) * self.n_stages

    @functools.cached_property
    def moments(self) -> tuple[tuple[tuple[tuple[int, ...], int], ...], ...]:
        """Per rank, what it must have room for: (microbatches alive in each of its stages, which one acts).

        Alive as for :attr:`in_flight`; moments that another of the same stage contains are left out.
        """
        out = []
        for rank, row in enumerate(self.actions):
            own = {s: x for x, s in enumerate(self.stages_of(rank))}
            alive, seen = [0] * len(own), set()
            for a in row:
                if a.kind == "F" and self.has_backward:
                    alive[own[a.stage]] += 1
                seen.add((tuple(alive), own[a.stage]))
                if a.kind in "BW":
                    alive[own[a.stage]] -= 1
            out.append(tuple(sorted(m for m in seen if not any(_contains(o, m) for o in seen))))
        return tuple(out)

    def __str__(self) -> str:
        return "\n".join(f"rank {r}: " + " ".join(map(str, row)) for r, row in enumerate(self.actions))


def _contains(larger: tuple[tuple[int, ...], int], moment: tuple[tuple[int, ...], int]) -> bool:
    same_stage = larger[1] == moment[1] and larger != moment
    return same_stage and all(a >= b for a, b in zip(larger[0], moment[0], strict=True))


def parse_action(text: str) -> Action | None:
    """The action written like ``2F0``, or None for anything else."""
    match = re.fullmatch(r"(\d{1,7})([FBIW])(\d{1,7})", text, re.ASCII)
    return Action(int(match[1]), cast(Kind, match[2]), int(match[3])) if match else None


def may_overlap(before: Action, action: Action) -> bool:
    """Whether a backward needs nothing of the forward right before it on its rank."""
    return before.kind == "F" and action.kind in "BI" and before.microbatch != action.microbatch


def ordered(schedule: Schedule) -> tuple[list[tuple[int, int, int]], dict[int, int]]:
    """The actions in dependency order as far as the ranks get, and per stuck rank the index it is stuck at.

    Each rank runs until it needs what is not there yet; what it produces wakes the ranks of the stages
    next to it. F waits for F of the stage before, B and I for B or I of the stage after, W for its own I.
    """
    n, last = schedule.n_microbatches, schedule.n_stages - 1
    rows = [[(4 * a.stage + KINDS.index(a.kind), a.microbatch) for a in row] for row in schedule.actions]
    forward = [bytearray(n) for _ in schedule.placement]
    backward = [bytearray(n) for _ in schedule.placement]
    position = [0] * len(rows)
    order: list[tuple[int, int, int]] = []
    awake = list(range(len(rows) - 1, -1, -1))
    while awake:
        rank = awake.pop()
        row, i = rows[rank], position[rank]
        while i < len(row):
            code, m = row[i]
            stage, kind = code >> 2, code & 3
            if kind == F:
                if stage and not forward[stage - 1][m]:
                    break
                forward[stage][m] = 1
                if stage < last and schedule.placement[stage + 1] != rank:
                    awake.append(schedule.placement[stage + 1])
            elif kind == W:
                if not backward[stage][m]:
                    break
            else:
                if not forward[stage][m] or (stage < last and not backward[stage + 1][m]):
                    break
                backward[stage][m] = 1
                if stage and schedule.placement[stage - 1] != rank:
                    awake.append(schedule.placement[stage - 1])
            order.append((rank, code, m))
            i += 1
        position[rank] = i
    return order, {r: i for r, i in enumerate(position) if i < len(rows[r])}
