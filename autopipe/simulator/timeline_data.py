"""A step laid out in time as plain data: actions, messages, the tail, memory.

What judges and draws it is left to the modules beside this one, which ``timeline`` puts together.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Self

from ..errors import InputError
from ..memory import RankMemory, StageMemory, rank_memory
from ..schedule import Action, Schedule
from ..schedule.clock import GatheredRow, SentRow
from ..units import format_seconds, n_of

__all__ = ["Event", "Sent", "TimelineData"]


class Event(NamedTuple):
    """A rank at an action, or after its last at ``"uneven"``, ``"ties"``, ``"loss"`` or ``"optimizer"``.

    ``"uneven"`` is what a step waits for microbatches that take longer than others, counted at its end,
    ``"loss"`` what a rank waits for the step's loss.
    """

    rank: int
    action: Action | str
    start_s: float
    end_s: float


class Sent(NamedTuple):
    """One message between ranks, from when it leaves to when it has arrived.

    ``is_gradient`` messages go from a later stage (``source``) to an earlier one.
    """

    source: int
    destination: int
    is_gradient: bool
    microbatch: int
    start_s: float
    end_s: float
    n_bytes: int

    @property
    def label(self) -> str:
        """Such as ``0→1F3``."""
        return f"{self.source}→{self.destination}{'B' if self.is_gradient else 'F'}{self.microbatch}"


@dataclasses.dataclass(frozen=True)
class TimelineData:
    """One step of a schedule in time; times are seconds from its start.

    Attributes
    ----------
    schedule: whose actions ran.
    starts_s, ends_s: per rank, aligned with the schedule's actions.
    step_s: when everything is done.
    sent: the messages between ranks, as :class:`Sent` tuples.
    tail: what ranks do after their last action.
    memory: per stage, its bytes; None where unknown.
    shared_bytes: per rank, bytes of tied parameters that several of its stages count.
    source: ``simulated`` or ``measured``.
    gathered: each time that a stage's weights were brought together.
    """

    schedule: Schedule
    starts_s: Sequence[Sequence[float]]
    ends_s: Sequence[Sequence[float]]
    step_s: float
    sent: Sequence[SentRow] = ()
    tail: tuple[Event, ...] = ()
    memory: tuple[StageMemory, ...] | None = None
    shared_bytes: tuple[int, ...] = ()
    source: Literal["simulated", "measured"] = "simulated"
    gathered: tuple[GatheredRow, ...] = ()

    @classmethod
    def from_events(
        cls,
        schedule: Schedule,
        events: Iterable[tuple[int, Action | str, float, float]],
        sent: Sequence[SentRow] = (),
        *,
        step_s: float | None = None,
        memory: Sequence[StageMemory] | None = None,
        source: Literal["simulated", "measured"] = "measured",
    ) -> Self:
        """A timeline of what ran: (rank, action or label, start, end) in any order.

        Raises :class:`InputError` where an action of the schedule is missing.
        """
        spans: dict[tuple[int, Action], tuple[float, float]] = {}
        tail = []
        last = 0.0
        for rank, action, start, end in events:
            last = max(last, end)
            if isinstance(action, str):
                tail.append(Event(rank, action, start, end))
            else:
                spans[rank, action] = (start, end)
        missing = [
            f"rank {r}: {a}" for r, row in enumerate(schedule.actions) for a in row if (r, a) not in spans
        ]
        if missing:
            raise InputError(
                f"{len(missing)} actions of schedule {schedule.name!r} have no times, the first "
                f"{missing[0]}; a timeline is of a whole step"
            )
        starts, ends = (
            [[spans[r, a][i] for a in row] for r, row in enumerate(schedule.actions)] for i in (0, 1)
        )
        kept = tuple(memory) if memory is not None else None
        return cls(
            schedule, starts, ends, last if step_s is None else step_s, sent, tuple(tail), kept, (), source
        )

    @functools.cached_property
    def events(self) -> tuple[Event, ...]:
        """Every action and what follows, rank by rank in order."""
        return tuple(e for rank in range(self.schedule.n_ranks) for e in self.events_of(rank))

    def events_of(self, rank: int) -> Iterator[Event]:
        """What one rank does, in order."""
        row = zip(self.schedule.actions[rank], self.starts_s[rank], self.ends_s[rank], strict=True)
        yield from (Event(rank, a, start, end) for a, start, end in row)
        yield from (e for e in self.tail if e.rank == rank)

    @functools.cached_property
    def transfers(self) -> tuple[Sent, ...]:
        """The messages between ranks."""
        return tuple(map(Sent._make, self.sent))

    @functools.cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Per rank, seconds in actions and the optimizer."""
        busy = [sum(e) - sum(s) for s, e in zip(self.starts_s, self.ends_s, strict=True)]
        for event in self.tail:
            if event.action == "optimizer":
                busy[event.rank] += event.end_s - event.start_s
        return tuple(busy)

    @property
    def before_optimizer_s(self) -> float:
        """When gradients are ready, tied ones summed: what ``Runtime.step`` takes, without an optimizer's."""
        ends = [row[-1] for row in self.ends_s if len(row)]
        return max([*ends, *(e.end_s for e in self.tail if e.action != "optimizer")], default=0.0)

    @property
    def work_s(self) -> float:
        """The actions of all ranks one after another."""
        return sum(
            end - start
            for starts, ends in zip(self.starts_s, self.ends_s, strict=True)
            for start, end in zip(starts, ends, strict=True)
        )

    @property
    def in_turn(self) -> bool:
        """Whether no two of several ranks' actions overlap: as when one process runs them all."""
        spans = sorted((e.start_s, e.end_s) for e in self.events if not isinstance(e.action, str))
        apart = all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        return self.schedule.n_ranks > 1 and apart

    @property
    def bubble_fraction(self) -> float:
        """Idle over total: 1 − busy / (ranks × step)."""
        return 1 - sum(self.busy_s) / (self.schedule.n_ranks * self.step_s) if self.step_s else 0.0

    @functools.cached_property
    def rank_memory(self) -> tuple[RankMemory, ...]:
        """Per rank, its static and peak bytes; empty where the stages' bytes are unknown."""
        return rank_memory(self.schedule, self.memory, self.shared_bytes) if self.memory else ()

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Per rank, its peak; empty where the stages' bytes are unknown."""
        return tuple(m.total_bytes for m in self.rank_memory)

    def memory_over_time(self, rank: int) -> tuple[tuple[float, int], ...]:
        """(seconds, bytes from then on) of a rank, at every start and end of an action."""
        if not self.memory:
            return ()
        static = self.rank_memory[rank].static_bytes
        static += sum(self.memory[s].boundary_bytes for s in self.schedule.stages_of(rank))
        alive, out = 0, [(0.0, static)]
        row = zip(self.schedule.actions[rank], self.starts_s[rank], self.ends_s[rank], strict=True)
        for a, start, end in row:
            saved = self.memory[a.stage].saved_bytes if self.schedule.has_backward else 0
            if a.kind == "F":
                alive += saved
            out.append((start, static + alive + self.memory[a.stage].workspace_bytes))
            if a.kind in "BW":
                alive -= saved
            out.append((end, static + alive))
        return tuple(out)

    @property
    def summary(self) -> str:
        """One line: what ran, how long a step takes, how much of it is bubble."""
        return (
            f"{self.schedule.name}, {n_of(self.schedule.n_stages, 'stage')} on "
            f"{n_of(self.schedule.n_ranks, 'rank')}, "
            f"{n_of(self.schedule.n_microbatches, 'microbatch', 'microbatches')}: "
            f"{format_seconds(self.step_s)} {self.source}, bubble {self.bubble_fraction:.1%}"
        )
