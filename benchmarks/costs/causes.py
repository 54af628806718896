"""Names what makes a step longer than predicted: each cause's part of the step, predicted and measured.

Running the steps is left to ``rank``. A part is what the step gains when the cause is added to those before
it, on the schedule as it ran: so the parts add up to the step, and fillers of bubbles count for nothing.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import autopipe
from autopipe.schedule import Action
from autopipe.simulator import plan_schedule, stage_times

__all__ = ["CAUSES", "Ran", "causes", "ends_s"]

CAUSES = ("compute", "unevenness", "handling", "start and end", "optimizer", "chance", "messages")
"""Stages at their medians; microbatches that take longer than others in every step; what runs between
actions; what comes before the first and after the last, the sum of tied gradients with it; the optimizer's
step; waiting for peers whose microbatches take longer in one step or another; and for messages, the rest."""

Seconds = Mapping[Action, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """One rank's step by the host's clock, which all ranks of a machine share.

    ``marks`` are (action or None, start, end): actions, and sends and waits for messages in between.
    """

    start_s: float
    marks: tuple[tuple[Action | None, bool, float, float], ...]
    end_s: float
    stepped_s: float

    @classmethod
    def of(cls, runtime: Any, optimizer: Any | None, args: Any, kwargs: Any) -> Ran:
        """Of a step of the runtime and one of the optimizer, if there is one, from now."""
        start = time.perf_counter()
        runtime.step(*args, **kwargs)
        end = time.perf_counter()
        if optimizer is not None:
            optimizer.step()
        stepped = time.perf_counter()
        marks = []
        for what, begun, ended in runtime._engine.records[-1][2].marks:
            is_action = isinstance(what, Action)
            marks.append((what if is_action else None, not is_action and what.kind == "recv", begun, ended))
        return cls(start, tuple(marks), end, stepped)

    @property
    def actions(self) -> dict[Action, float]:
        """Seconds of each action."""
        return {a: end - start for a, _, start, end in self.marks if a is not None}

    @property
    def handling(self) -> float:
        """Seconds per action that are neither an action nor a wait for a message, first to last mark."""
        waited = sum(end - start for a, is_wait, start, end in self.marks if a is not None or is_wait)
        return (self.marks[-1][3] - self.marks[0][2] - waited) / len(self.actions)

    @property
    def before(self) -> float:
        """Seconds until the first mark."""
        return self.marks[0][2] - self.start_s

    @property
    def after(self) -> float:
        """Seconds from the last mark to the end of the runtime's step."""
        return self.end_s - self.marks[-1][3]


def causes(plan: autopipe.Plan, steps: Sequence[Sequence[Ran]], measured_s: float) -> dict[str, Any]:
    """By cause, its predicted and measured part of the step in seconds; ``steps`` has every rank's."""
    schedule = plan_schedule(plan)
    predicted = _Parts.planned(plan)
    found = _Parts.measured(schedule, steps)
    out: dict[str, Any] = {}
    for name, parts, total in (("predicted", predicted, plan.step_s), ("measured", found, measured_s)):
        before = 0.0
        for cause in CAUSES:
            reached = total if cause == "messages" else parts.length(schedule, CAUSES.index(cause))
            out.setdefault(cause, {})[f"{name}_s"] = reached - before
            before = reached
    return out


@dataclasses.dataclass(frozen=True, slots=True)
class _Parts:
    """What a step is made of: per action, per rank, and what ranks wait for one another by chance."""

    even: Seconds
    actions: Seconds
    handling: Sequence[float]
    before: Sequence[float]
    after: Sequence[float]
    optimizer: Sequence[float]
    chance: float

    @classmethod
    def planned(cls, plan: autopipe.Plan) -> _Parts:
        times = stage_times(plan)
        rows = plan_schedule(plan).actions
        even = {a: times[a.stage].seconds(a.kind) for row in rows for a in row}
        timeline = autopipe.simulate(plan)
        ran = {e.action: e.end_s - e.start_s for e in timeline.events if isinstance(e.action, Action)}

        def tail(what: str) -> list[float]:
            found = {e.rank: e.end_s - e.start_s for e in timeline.tail if e.action == what}
            return [found.get(r, 0.0) for r in range(plan.n_ranks)]

        sending = [0.0] * plan.n_ranks
        for sent in timeline.transfers if plan.cluster.cores else ():
            here, there = plan.placement[sent.source], plan.placement[sent.destination]
            sending[here] += plan.cluster.link(here, there).working_s(sent.n_bytes)
        between = [device.action_s for device in plan.cluster.devices]
        handling = [s / len(row) + b for s, row, b in zip(sending, rows, between, strict=True)]
        # an action is simulated with the sending of what came before it
        alone = {a: ran[a] - handling[plan.placement[a.stage]] for a in ran}
        start = [min(row[0] for row in timeline.starts_s)] * plan.n_ranks
        return cls(even, alone, handling, start, tail("ties"), tail("optimizer"), tail("uneven")[0])

    @classmethod
    def measured(cls, schedule: Any, steps: Sequence[Sequence[Ran]]) -> _Parts:
        actions = {
            a: statistics.median(step.actions[a] for step in rank) for rank in steps for a in rank[0].actions
        }
        like: dict[tuple[int, str], list[float]] = {}
        for a, seconds in actions.items():
            like.setdefault((a.stage, a.kind), []).append(seconds)
        even = {a: statistics.median(like[a.stage, a.kind]) for a in actions}

        def each(get: Any) -> list[float]:
            return [statistics.median(map(get, rank)) for rank in steps]

        made = cls(
            even,
            actions,
            each(lambda r: r.handling),
            each(lambda r: r.before),
            # who sends the loss does not wait for it
            [min(each(lambda r: r.after))] * len(steps),
            each(lambda r: r.stepped_s - r.end_s),
            0.0,
        )
        upto = CAUSES.index("optimizer")
        typical_s = made.length(schedule, upto)
        found = ({a: s for ran in step for a, s in ran.actions.items()} for step in zip(*steps, strict=True))
        lengths = [dataclasses.replace(made, actions=each_s).length(schedule, upto) for each_s in found]
        return dataclasses.replace(made, chance=statistics.median(lengths) - typical_s)

    def length(self, schedule: Any, upto: int) -> float:
        """Seconds of the step with the causes up to one of them, and messages for free."""
        ends = ends_s(
            schedule,
            self.actions if upto > 0 else self.even,
            self.handling if upto > 1 else [0.0] * len(self.handling),
            [s if upto > 2 else 0.0 for s in self.before],
        )
        tails = [
            (self.after[r] if upto > 2 else 0.0) + (self.optimizer[r] if upto > 3 else 0.0)
            for r in range(len(ends))
        ]
        return max(t + tail for t, tail in zip(ends, tails, strict=True)) + (self.chance if upto > 4 else 0.0)


def ends_s(
    schedule: Any, actions: Seconds, handling: Sequence[float], before: Sequence[float]
) -> list[float]:
    """When each rank has run its actions, each as soon as what it needs is there: messages take no time.

    ``handling`` is each rank's time after every action, ``before`` that ahead of its first.
    """
    free = [*before]
    ends: dict[tuple[int, str, int], float] = {}
    last = schedule.n_stages - 1
    for rank, code, m in schedule.order:
        stage, kind = code >> 2, "FBIW"[code & 3]
        needs = [(stage - 1, "F", m)] if kind == "F" else [(stage + 1, k, m) for k in "BI"] * (stage < last)
        ready = max((ends.get(need, 0.0) for need in needs), default=0.0)
        start = max(free[rank], ready if kind != "W" else 0.0)
        free[rank] = ends[stage, kind, m] = start + actions[Action(stage, kind, m)] + handling[rank]
    return free
