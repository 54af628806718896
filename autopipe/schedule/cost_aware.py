"""The cost-aware schedule: the best of the templates and of many list schedules.

Everything is judged in simulation with the plan's own times, transfers and memory budget, so the result is
at least as good there as the best template. The same arguments give the same schedule on every rank. How
the times come about is left to ``measure`` and ``solve``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from ..hardware import Cluster
from .actions import Action, Schedule, StageTimes, Transfer
from .clock import Edges, run
from .list_scheduling import Rules, list_schedule
from .templates import COST_AWARE, SPLIT, TEMPLATES, template

__all__ = ["cost_aware", "saved_peaks"]

WORK = 1_000_000
"""How many actions the list schedules tried may have together: a count, so that all ranks try the same."""


@dataclasses.dataclass(frozen=True)
class _Problem:
    """What schedules are judged by."""

    placed: tuple[int, ...]
    n_ranks: int
    n_microbatches: int
    times: tuple[StageTimes, ...]
    transfers: tuple[Transfer, ...] | None
    cluster: Cluster | None
    saved_bytes: tuple[int, ...]
    budget_bytes: tuple[float, ...]

    def step_s(self, schedule: Schedule) -> float:
        clock = run(schedule, self.times, Edges.of(schedule, self.transfers), self.cluster)
        return max(row[-1] for row in clock.ends_s)

    def excess(self, schedule: Schedule) -> float:
        """Saved bytes over budget, summed over ranks."""
        peaks = saved_peaks(schedule, self.saved_bytes) if self.budget_bytes else ()
        return sum(max(0.0, p - b) for p, b in zip(peaks, self.budget_bytes, strict=True))

    def score(self, schedule: Schedule) -> tuple[float, float, int]:
        """Less is better: whatever is over budget, then the step to ten digits, then the memory."""
        each = self.saved_bytes or (1,) * len(self.placed)
        step_s = float(f"{self.step_s(schedule):.10g}")
        return self.excess(schedule), step_s, max(saved_peaks(schedule, each))


def cost_aware(
    placed: Sequence[int],
    n_ranks: int,
    n_microbatches: int,
    *,
    times: Sequence[StageTimes] | None = None,
    transfers: Sequence[Transfer] | None = None,
    cluster: Cluster | None = None,
    saved_bytes: Sequence[int] = (),
    budget_bytes: Sequence[float] = (),
) -> Schedule:
    """A schedule of the placed stages that simulates no slower than any template within the budget.

    ``saved_bytes`` is what a microbatch saves in each stage, ``budget_bytes`` what all may save on each
    rank; without them memory is not limited. Where nothing fits the budget, what exceeds it least is taken;
    among equally fast schedules the one that holds least.
    I and W are used only where their times are known (``backward_input_s`` or ``backward_weight_s``).

    Complexity: the templates and up to some dozens of list schedules, fewer the larger they are.
    """
    problem = _Problem(
        placed=tuple(placed),
        n_ranks=n_ranks,
        n_microbatches=n_microbatches,
        times=tuple(times or (StageTimes(),) * len(placed)),
        transfers=None if transfers is None else tuple(transfers),
        cluster=cluster,
        saved_bytes=tuple(saved_bytes),
        budget_bytes=tuple(budget_bytes) if saved_bytes else (),
    )
    best = min(_candidates(problem), key=problem.score)
    return dataclasses.replace(_merged(problem, best), name=COST_AWARE)


def saved_peaks(schedule: Schedule, saved_bytes: Sequence[int]) -> tuple[int, ...]:
    """Per rank, the most bytes its stages save at once. Linear in the actions."""
    peaks = []
    for row in schedule.actions:
        alive = peak = 0
        for a in row:
            if a.kind == "F":
                alive += saved_bytes[a.stage]
                peak = max(peak, alive)
            elif a.kind != "I":
                alive -= saved_bytes[a.stage]
        peaks.append(peak)
    return tuple(peaks)


def _candidates(problem: _Problem) -> Iterator[Schedule]:
    can_split = all(t.backward_input_s or t.backward_weight_s or not t.backward_s for t in problem.times)
    for name in TEMPLATES:
        if name != "forward-only" and (can_split or name not in SPLIT):
            yield template(name, problem.placed, problem.n_ranks, problem.n_microbatches)
    n_actions = (3 if can_split else 2) * len(problem.placed) * problem.n_microbatches
    for rules in itertools.islice(_rules(problem, can_split), max(2, WORK // n_actions)):
        yield list_schedule(
            COST_AWARE,
            problem.placed,
            problem.n_ranks,
            problem.n_microbatches,
            rules,
            times=problem.times,
            transfers=problem.transfers or (),
            cluster=problem.cluster,
        )


def _rules(problem: _Problem, can_split: bool) -> Iterator[Rules]:
    """Limits on what is in flight, from as little as covers the way down and back to none but the budget."""
    depths, n = _depths(problem), problem.n_microbatches
    splits = (True, False) if can_split else (False,)
    for scale, split, patience in itertools.product((1, 2, math.inf, 1.5), splits, (0.0, 1.0)):
        if patience and not split:
            continue
        active = tuple(n if scale == math.inf else min(n, math.ceil(d * scale)) for d in depths)
        for held in sorted({max(active), min(n, 2 * max(active)), n}) if split else [n]:
            yield Rules(
                split, active, (held,) * len(active), patience, problem.saved_bytes, problem.budget_bytes
            )


def _depths(problem: _Problem) -> tuple[int, ...]:
    """Per stage, how many microbatches cover the way from its F to its B at the pace of the busiest rank."""
    load = [0.0] * problem.n_ranks
    for stage, rank in enumerate(problem.placed):
        load[rank] += problem.times[stage].forward_s + problem.times[stage].backward_s
    pace = max(load)
    depths, way = [], 0.0
    for stage in reversed(range(len(problem.placed))):
        t = problem.times[stage]
        way += t.forward_s + t.backward_s
        depths.append(max(1, math.ceil(way / pace)) if pace else 1)
        if stage and problem.cluster is not None:
            link = problem.cluster.link(problem.placed[stage - 1], problem.placed[stage])
            n_bytes = sum(x.n_bytes for x in problem.transfers or () if x.destination == stage)
            way += 2 * link.seconds(n_bytes)
    return tuple(reversed(depths))


def _merged(problem: _Problem, schedule: Schedule) -> Schedule:
    """I with its W right behind becomes B again, rank by rank where that is no slower: B may be cheaper."""
    best, step_s = schedule, problem.step_s(schedule)
    for rank in range(schedule.n_ranks):
        rows = list(best.actions)
        rows[rank] = _merge(rows[rank])
        trial = dataclasses.replace(best, actions=tuple(rows))
        if rows[rank] != best.actions[rank] and problem.step_s(trial) <= step_s:
            best, step_s = trial, problem.step_s(trial)
    return best


def _merge(row: Sequence[Action]) -> tuple[Action, ...]:
    out: list[Action] = []
    for a in row:
        if a.kind == "W" and out and out[-1] == Action(a.stage, "I", a.microbatch):
            out[-1] = Action(a.stage, "B", a.microbatch)
        else:
            out.append(a)
    return tuple(out)
