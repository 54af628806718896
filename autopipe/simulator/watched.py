"""A running job as seen from outside: what its ranks last wrote to a folder, and the report it makes.

Writing there is left to ``runtime``, showing it to ``look``.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from ..errors import ScheduleError, StoreError
from ..plans import Plan
from ..schedule import check
from ..schema import Index, Name, Real, build, load, refuse
from ..shown import Shown
from .recorded import Recorded, make_report
from .report import Report

__all__ = ["Watchable", "Watched", "plan_file", "rank_file", "watched"]

MOST = 1 << 16
"""Microbatches of a step."""
Steps = Annotated[int, msgspec.Meta(ge=0, le=2**50)]


class Watchable(msgspec.Struct, frozen=True):
    """What one rank writes: of which plan, how many steps it has made, when, and its last steps.

    ``at_s``: seconds since the epoch, on its host. ``loss``: of that step, where it could be read without
    waiting.
    """

    plan: Name
    rank: Index
    n_ranks: Index
    step: Steps
    at_s: Real
    loss: float | None
    recorded: Recorded


@dataclasses.dataclass(frozen=True, slots=True)
class Watched(Shown):
    """A running job: the report of the last steps that every rank has told of, and how long ago that was.

    Attributes
    ----------
    report: as :meth:`Runtime.report` makes it, of the last few steps.
    step: how many steps were made.
    age_s: seconds since the rank that is longest silent wrote, by this host's clock.
    loss: of the newest step, where it is known.
    longest_s: how long the longest of these steps took.
    """

    report: Report
    step: int
    age_s: float
    loss: float | None
    longest_s: float

    @property
    def is_silent(self) -> bool:
        """Whether for many steps' time nothing was written: the job has ended, or stands still."""
        return self.age_s > max(10.0, 5 * self.longest_s)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        run = self.report
        own = {"step": self.step, "age_s": self.age_s, "loss": self.loss, "is_silent": self.is_silent}
        idle = {
            "bubble_fraction": run.timeline.bubble_fraction,
            "bubble": dataclasses.asdict(run.timeline.bubble),
        }
        ranks = {"slowness": list(run.slowness), "stragglers": list(run.stragglers), "drift": run.drift}
        return {**own, **idle, **ranks, "report": run.to_dict()}


def plan_file(folder: pathlib.Path, digest: str) -> pathlib.Path:
    """Where the plan lies that ranks' files speak of."""
    return folder / f"plan-{digest}.json"


def rank_file(folder: pathlib.Path, rank: int) -> pathlib.Path:
    """Where a rank writes."""
    return folder / f"rank-{rank}.json"


def watched(folder: str | pathlib.Path) -> Watched | None:
    """What a job that publishes to ``folder`` does now; None until all its ranks have told of one step.

    Raises :class:`StoreError` for a folder that no job publishes to, and for files that are not a job's.
    """
    place = pathlib.Path(folder)
    if not place.is_dir():
        raise StoreError(f"{place} is no folder; have the job publish there: rt.publish({str(folder)!r})")
    files = sorted(place.glob("rank-*.json"))
    told = [_read(path) for path in files]
    if not told:
        return None
    newest = max(told, key=lambda one: one.at_s)
    told = sorted((one for one in told if one.plan == newest.plan), key=lambda one: one.rank)
    if [one.rank for one in told] != list(range(newest.n_ranks)):
        return None  # some have not written yet, or not since the job was cut anew
    path = plan_file(place, newest.plan)
    if not path.exists():
        return None
    plan = Plan.from_json(path)
    for one in told:
        _check(plan, one, f"what rank {one.rank} wrote to {place}")
    common = _in_common(told)
    if not common:
        return None
    try:
        report = make_report(plan, common)
        check(report.ran)
    except ScheduleError as error:
        raise refuse(
            f"what ranks wrote to {place}", "recorded.steps", f"have no whole step: {error}"
        ) from error
    age_s = time.time() - min(one.at_s for one in told)
    longest_s = max(ran.length_s for record in common for ran in record.steps)
    return Watched(report, min(one.step for one in told), max(0.0, age_s), newest.loss, longest_s)


def _read(path: pathlib.Path) -> Watchable:
    what = f"what a rank wrote to {path}"
    return build(Watchable, load(path, what), what)


def _in_common(told: Sequence[Watchable]) -> list[Recorded]:
    """Of each rank the steps that all of them have; none where there is no such step, or not its messages."""
    first = max(one.step - len(one.recorded.steps) for one in told)
    last = min(one.step for one in told)
    if last <= first:
        return []
    out = []
    for one in told:
        begins = one.step - len(one.recorded.steps)
        out.append(
            msgspec.structs.replace(one.recorded, steps=one.recorded.steps[first - begins : last - begins])
        )
    sent = {message for one in out for message, _, _ in one.steps[-1].sent}
    awaited = {message for one in out for message, _, _ in one.steps[-1].awaited}
    sizes = {message for one in out for message, _ in one.message_bytes}
    return out if sent == awaited and sent <= sizes else []


def _check(plan: Plan, told: Watchable, what: str) -> None:
    """Raise :class:`StoreError` for steps that are none of the plan's, of this rank."""
    if told.n_ranks not in (1, plan.n_ranks):
        raise refuse(what, "n_ranks", f"is {told.n_ranks}, and the plan has {plan.n_ranks}")
    for ran in told.recorded.steps:
        own = {
            plan.placement[a.stage] if 0 <= a.stage < plan.n_stages and 0 <= a.microbatch < MOST else -1
            for a, _, _ in ran.actions
        }
        if -1 in own or (told.n_ranks > 1 and own - {told.rank}):
            raise refuse(what, "recorded.steps", "have actions that are not this rank's")
        ends = {s for m, _, _ in (*ran.sent, *ran.awaited) for s in (m.source, m.destination)}
        if any(not 0 <= stage < plan.n_stages for stage in ends):
            raise refuse(what, "recorded.steps", "have messages between stages that the plan has not")
