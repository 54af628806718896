"""What the plan predicted beside what was measured: per stage, per step, and every action in time.

Gathering it from the ranks is left to ``runtime``, drawing it to ``look``.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from ..plans import Plan
from ..schedule import Action, Schedule
from ..shown import Shown
from ..units import format_bytes, format_seconds, n_of
from .bubbles import Bubble
from .plan_inputs import plan_schedule
from .simulate_plan import simulate
from .timeline import Timeline
from .timeline_data import Sent

__all__ = ["DRIFTED", "Report", "StageReport"]

DRIFTED = 1.1
"""From which :attr:`Report.drift` on a report speaks of it."""
STRAGGLING = 1.2
"""From which :attr:`Report.slowness` on a rank is a straggler."""
RankedAction = tuple[int, Action, float, float]
"""(rank, action, start_s, end_s), seconds since the first rank began the step."""


@dataclasses.dataclass(frozen=True, slots=True)
class StageReport:
    """One stage: seconds per microbatch of each kind of action, predicted and measured (medians).

    ``measured`` has the kinds that ran: F, B, I, W.
    """

    index: int
    rank: int
    predicted: dict[str, float]
    measured: dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Report(Shown):
    """Predicted beside measured.

    Attributes
    ----------
    stages: see :class:`StageReport`.
    n_steps: how many recent steps ``stages`` were measured in.
    predicted_step_s, measured_step_s: of a step without the optimizer's, by the schedule that the last one
        ran by, be it the plan's or another; measured is the median of those of the recent ones that ran so,
        on the rank that took longest from when the rank before it had begun too.
    in_turn: whether one process ran all ranks, one action after another; the prediction is then of that.
    events: every action of the last step, on rank 0's clock.
    plan: what was predicted.
    peak_bytes: per rank the most its device held, as its allocator counts; on a host, by how much the
        process grew beyond what it had when the runtime was made, its own weights apart. Empty where nobody
        counts or one process ran all ranks.
    messages: between ranks in the last step, on the same clock.
    between_actions_s: per process, the seconds of a step between its actions that are no wait for a message,
        for each of them; medians of recent steps.
    beside_actions_s: per process, the seconds before its first action, or wait for its message, and after its
        last, likewise.
    """

    stages: tuple[StageReport, ...]
    predicted_step_s: float
    measured_step_s: float
    n_steps: int
    events: tuple[RankedAction, ...]
    plan: Plan
    in_turn: bool = False
    peak_bytes: tuple[int, ...] = ()
    messages: tuple[Sent, ...] = ()
    between_actions_s: tuple[float, ...] = ()
    beside_actions_s: tuple[float, ...] = ()

    @property
    def timeline(self) -> Timeline:
        """The last step as it ran, in the form the simulator's predictions have."""
        return Timeline.from_events(self.ran, self.events, self.messages, step_s=self.measured_step_s)

    @property
    def ran(self) -> Schedule:
        """Each rank's actions of the last step, in the order in which they ran."""
        rows: list[list[Action]] = [[] for _ in range(self.plan.n_ranks)]
        for rank, action, _, _ in self.events:
            rows[rank].append(action)
        n = 1 + max((a.microbatch for _, a, _, _ in self.events), default=0)
        return Schedule(self.plan.schedule, self.plan.placement, n, tuple(map(tuple, rows)))

    @property
    def is_as_planned(self) -> bool:
        """Whether the last step ran by the plan's schedule, as it does where nothing else was asked for."""
        return not self.events or self.ran.actions == plan_schedule(self.plan).actions

    @property
    def predicted(self) -> Timeline:
        """The step that the plan predicts, under the schedule of the last one where that was another.

        Microbatches are as large as those that it was planned for.
        """
        return simulate(self.plan, schedule=None if self.is_as_planned else self.ran)

    @property
    def drift(self) -> float:
        """How many times further than planned the busiest rank's work is from the mean of all ranks.

        About that much shorter a step could be if it were cut anew; 1.0 where work lies as planned.
        """
        peaks = []
        for loads in (self._loads("measured"), self._loads("predicted")):
            peaks.append(max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0)
        return max(1.0, peaks[0] / peaks[1])

    @property
    def slowness(self) -> tuple[float, ...]:
        """Per rank, how many times longer its work takes than planned, the median rank's being 1.0."""
        pairs = zip(self._loads("measured"), self._loads("predicted"), strict=True)
        ratios = [took / said if said else 1.0 for took, said in pairs]
        middle = statistics.median(ratios)
        return tuple(ratio / middle if middle else 1.0 for ratio in ratios)

    @property
    def stragglers(self) -> tuple[int, ...]:
        """The ranks whose work takes :data:`STRAGGLING` times longer than the others', each as planned."""
        return tuple(rank for rank, factor in enumerate(self.slowness) if factor > STRAGGLING)

    @property
    def predicted_peak_bytes(self) -> tuple[int, ...]:
        """Per rank, the most that the plan says it holds."""
        return self.predicted.peak_bytes

    @property
    def other_schedule(self) -> str:
        """In words, by what schedule the last step ran and is predicted; empty where that is the plan's."""
        if self.is_as_planned:
            return ""
        ran, plan = self.ran, self.plan
        waits = ran.waits_for_all and ran.n_microbatches > 1
        how = ", every forward ahead of the first backward" if waits else ""
        return (
            f"predicted is what ran: {n_of(ran.n_microbatches, 'microbatch', 'microbatches')}{how}; the plan "
            f"is for {plan.schedule} with {plan.n_microbatches}"
        )

    def _loads(self, kind: str) -> list[float]:
        """Per rank, seconds of work on one microbatch: ``measured``, or ``predicted`` for what ran."""
        loads = [0.0] * self.plan.n_ranks
        for stage in self.stages:
            times = getattr(stage, kind)
            loads[stage.rank] += sum(times[action] for action in stage.measured)
        return loads

    @property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time of the last step in which no action ran."""
        if not self.events:
            return 0.0
        n_ranks = 1 + max(rank for rank, *_ in self.events)
        span = max(end for *_, end in self.events) - min(start for _, _, start, _ in self.events)
        return 1 - sum(end - start for _, _, start, end in self.events) / (n_ranks * span)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers, for JSON."""
        stages = [dataclasses.asdict(s) for s in self.stages]
        steps = {k: getattr(self, k) for k in ("predicted_step_s", "measured_step_s", "n_steps", "in_turn")}
        peaks = {"peak_bytes": list(self.peak_bytes)}
        if self.peak_bytes:
            peaks["predicted_peak_bytes"] = list(self.predicted_peak_bytes)
        return {
            "stages": stages,
            **steps,
            **peaks,
            "events": [[r, str(a), s, e] for r, a, s, e in self.events],
            "messages": [list(sent) for sent in self.messages],
        }

    def __str__(self) -> str:
        rows = [f"{'stage':>5} {'rank':>4} {'action':>6} {'predicted':>10} {'measured':>10} {'ratio':>6}"]
        for stage in self.stages:
            for kind, measured_s in stage.measured.items():
                rows.append(_row(stage.index, stage.rank, kind, stage.predicted[kind], measured_s))
        rows.append(_row("", "", "step", self.predicted_step_s, self.measured_step_s))
        rows += [self.other_schedule] if self.other_schedule else []
        rows += self._idle_rows() + self._memory_rows()
        for rank in self.stragglers:
            factor = self.slowness[rank]
            rows.append(f"rank {rank} straggles: its work takes {factor:.2f} times longer than the others'")
        if self.drift > DRIFTED:
            rows.append(
                f"the busiest rank is {self.drift:.2f} times further from the mean than planned: "
                "rebalance() would cut anew"
            )
        return "\n".join(rows)

    def _idle_rows(self) -> list[str]:
        """What kept each rank idle in the last step, where ranks ran beside one another."""
        if not self.events or self.in_turn:
            return []
        causes = [field.name.removesuffix("_s") for field in dataclasses.fields(Bubble)]
        rows = [f"{'idle':>5} {'rank':>4} {'in all':>6} " + " ".join(f"{cause:>13}" for cause in causes)]
        timeline = self.timeline
        for rank, idle in enumerate(timeline.bubbles):
            share = f"{idle.total_s / timeline.step_s:.0%}"
            times = " ".join(f"{format_seconds(getattr(idle, f'{cause}_s')):>13}" for cause in causes)
            rows.append(f"{'':>5} {rank:>4} {share:>6} {times}")
        return rows

    def _memory_rows(self) -> list[str]:
        """The most each rank held beside what the plan says, where somebody counts."""
        if not self.peak_bytes:
            return []
        rows = [f"{'':>5} {'rank':>4} {'memory':>6} {'predicted':>10} {'measured':>10} {'ratio':>6}"]
        for rank, (said, held) in enumerate(zip(self.predicted_peak_bytes, self.peak_bytes, strict=True)):
            ratio = f"{held / said:.2f}" if said else "–"
            sizes = f"{format_bytes(said):>10} {format_bytes(held):>10}"
            rows.append(f"{'':>5} {rank:>4} {'':>6} {sizes} {ratio:>6}")
        return rows


def _row(stage: object, rank: object, what: str, predicted_s: float, measured_s: float) -> str:
    ratio = f"{measured_s / predicted_s:.2f}" if predicted_s else "–"
    times = f"{format_seconds(predicted_s):>10} {format_seconds(measured_s):>10}"
    return f"{stage:>5} {rank:>4} {what:>6} {times} {ratio:>6}"
