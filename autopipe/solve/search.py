"""From a graph, its costs and a cluster to the plan with the fastest step, over all that was left free.

One case's bottleneck is left to ``answers``, its step to ``step``, what is tried to ``cases``.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

from ..arguments import number, taking
from ..costs import CostTable, OpCost
from ..errors import InfeasibleError, PlanError, UndecidedError
from ..graph import OpGraph
from ..hardware import Cluster
from ..plans import Candidate, Plan
from .answers import Answered, Known, answered, ordered
from .definition.answer import Answer
from .definition.problem import HUGE, Problem
from .definition.relaxed import needs_more
from .infeasible import closest, no_room, told_by, why_none
from .making.cases import Case, cases
from .making.options import Limit, Options
from .making.source import Source, limits_of
from .proof.shortage import Shortage, between_steps, shortage
from .step import as_run, fastest, shortest
from .stopping import clock_s, interrupts, timed_by_work

__all__ = ["check_room", "room_bytes", "solve", "usual_time_s"]

_PER_S = 1_500
"""Ops times ranks per second that a solve is given by default."""

_LONGEST_S = 1e9
"""More seconds than anyone waits."""

_PASSING_S = 0.1
"""Cases that cannot be at all are passed over for so much longer than the time given."""

_LEAST_SHARE = 1 / 8
"""Of the time left, what each case gets at least: the most promising come first."""

_SIMULATING = 1 / 4
"""Of a case's time, what is kept for simulating the chains that were found."""

_SIMULATING_DRAFT = 1 / 32
"""The same of a draft, which simulates three and makes no moves."""


@taking(Options)
def solve(
    graph: OpGraph,
    costs: CostTable,
    cluster: Cluster,
    is_draft: bool = False,
    known: Known | None = None,
    *,
    time_limit_s: float | None = None,
    **asked: Any,
) -> Plan:
    """The plan that simulates fastest among chains near the least bottleneck, with a certificate.

    The bottleneck is solved exactly, chains near it are simulated, and so are the uniform and by-parameters
    splits: with ``balance="cost"`` the plan never simulates slower than either. The fastest few are improved
    by moving single ops over a cut.

    Parameters
    ----------
    is_draft: whether the bottleneck is all that matters: neither chains near it are simulated nor moves.
    known: a dict for the bottlenecks of one graph's drafts and of what comes of them: one that is there and
        proved, or for a draft near its bound, is not looked for again.
    time_limit_s: after it, or on Ctrl-C, the best plan so far is returned with its certified gap; by default
        2 s, and for large graphs up to 20 s, of the processor's time, so that a busy machine plans alike.
    asked: the fields of :class:`Options`: counts of stages and microbatches, schedule, limits, pins and such.

    Raises :class:`InfeasibleError` when no plan fits, :class:`InputError` for unknown settings.
    """
    given = Options(**asked)
    limit_s = usual_time_s(graph, cluster) if time_limit_s is None else time_limit_s
    limit_s = number("time_limit_s", limit_s, most=_LONGEST_S, unit="seconds")
    with timed_by_work(time_limit_s is None):
        deadline = clock_s() + limit_s
        tried = cases(Source.of(graph, costs, cluster, given), given)
        if not tried:
            raise InfeasibleError(
                f"no schedule places {given.n_stages} stages on {cluster.n_ranks} ranks with these pins; "
                "use a multiple of the ranks"
            )
        with interrupts() as stopped:
            return _Search(tried, given, deadline, stopped, is_draft, known).plan()


def check_room(graph: OpGraph, cluster: Cluster, **asked: Any) -> None:
    """Raise :class:`InfeasibleError` where parameters and what trains them are too much for all ranks.

    No costs are needed for that, which may take long to measure. ``asked`` is that of :func:`solve`.
    """
    given = Options(**asked)
    free = CostTable({op.name: OpCost() for op in graph.compute}, {d.name: d.example for d in graph.dims})
    source = Source.of(graph, free, cluster, given)
    if room_bytes(cluster, given.memory_limit) is None:
        return
    if not (tried := cases(source, given)):
        return
    case = max(tried, key=lambda case: len(case.ranks))
    try:
        problem = case.problem()
    except PlanError:
        return  # there is none for another reason, which solving tells
    if (short := between_steps(problem)) is not None:
        raise no_room(case, problem, short, None)


def room_bytes(cluster: Cluster, memory_limit: Limit = None) -> int | None:
    """The bytes that all ranks hold together; None where one of them has no limit."""
    asked = limits_of(memory_limit, cluster.n_ranks) or (None,) * cluster.n_ranks
    known = [
        [b for b in (device.usable_bytes, own) if b is not None]
        for device, own in zip(cluster.devices, asked, strict=True)
    ]
    return sum(map(min, known)) if all(known) else None


def usual_time_s(graph: OpGraph, cluster: Cluster) -> float:
    """The seconds that a solve may take where nobody says."""
    return min(20.0, max(2.0, len(graph.ops) * cluster.n_ranks / _PER_S))


def _listed(ranked: Sequence[Candidate], best: Plan) -> tuple[Candidate, ...]:
    """The best candidate of each label like the plan in schedule and stages, and of each other kind."""
    kept: list[Candidate] = []
    seen = set[Any]()
    for c in ranked:
        kind: Any = c.schedule, c.n_stages
        kind = c.label if kind == (best.schedule, best.n_stages) else kind
        if kind not in seen:
            kept.append(c)
        seen.add(kind)
    return tuple(kept)


@dataclasses.dataclass(slots=True)
class _Search:
    """The cases of a solve and until when they are looked at; the best plan, and what the others left open.

    ``table`` is of every candidate. ``failed`` is a case where nothing was found, one that proves it only
    where all do; ``unfit`` are all that prove it; ``fault`` is of one that could not be tried; ``short`` are
    ranks that together have no room for what must be held between steps; ``n_left`` is how many there was no
    time for. By the identity of cases, ``lacks`` has what is short without any search, and ``least_s`` bounds
    the steps of those that were solved.
    """

    tried: Sequence[Case]
    asked: Options
    deadline: float
    stopped: threading.Event
    is_draft: bool
    known: Known | None
    best: Plan | None = None
    table: list[Candidate] = dataclasses.field(default_factory=list)
    failed: Answered | None = None
    fault: PlanError | None = None
    unfit: list[Problem] = dataclasses.field(default_factory=list)
    short: list[frozenset[int]] = dataclasses.field(default_factory=list)
    n_left: int = 0
    lacks: dict[int, Shortage] = dataclasses.field(default_factory=dict)
    least_s: dict[int, float] = dataclasses.field(default_factory=dict)

    def plan(self) -> Plan:
        """The plan with the shortest step, and the best candidates and bound of all cases.

        Raises why there is none, or that none was found and none ruled out; ``KeyboardInterrupt`` where the
        search was ended before any was found.
        """
        self._look()
        if self.best is None and self.stopped.is_set():
            raise KeyboardInterrupt
        best = as_run(self._looked_again() if self.best is None else self.best)
        ranked = sorted(self.table, key=lambda c: (not c.feasible, c.step_s))
        least_s = min(self.least_s.get(id(case)) or case.least_step_s for case in self.tried)
        bounds = dataclasses.replace(best.bounds, step_lower_s=min(least_s, best.step_s))
        return dataclasses.replace(
            best, bounds=bounds, candidates=_listed(ranked, best), n_candidates=len(ranked)
        )

    def _look(self) -> None:
        """Cases by rising bound on their step, as far as time suffices.

        Where nothing fits the first, those that hold least come next: one may fit, or rule out the others.
        """
        ahead = sorted(self.tried, key=lambda c: c.least_step_s)
        while ahead:
            is_unfit = self.failed is not None and self.best is None
            case = min(ahead, key=lambda c: c.n_held) if is_unfit else ahead[0]
            now = clock_s()
            is_told = self.best is not None or self.failed is not None or now > self.deadline + _PASSING_S
            if self.stopped.is_set() or (self.table and now > self.deadline and is_told):
                self.n_left += sum(not self._is_short(left) for left in ahead)
                return
            ahead.remove(case)
            if self._is_short(case) or (self.asked.any_schedule and not case.is_possible):
                continue
            left_s = max(0.0, self.deadline - now)
            if self.asked.any_schedule and case.making_s > left_s:
                self.n_left += 1
                continue
            self._enter(case, now + left_s * max(_LEAST_SHARE, 1 / (len(ahead) + 1)))

    def _enter(self, case: Case, deadline: float) -> None:
        """Solve a case, and keep its plan if it is the best, or why it has none."""
        plan = None
        try:
            plan = self._solved(case, deadline)
        except PlanError as error:
            self.fault = self.fault or error
        except KeyboardInterrupt:
            if self.best is None:
                raise
        if plan is None:
            kind = case.schedule, case.n_stages, case.n_microbatches
            self.table.append(Candidate(case.label, *kind, 0.0, 0, False))
            return
        self.table += plan.candidates
        if self.best is None or plan.step_s < self.best.step_s:
            self.best = plan

    def _solved(self, case: Case, deadline: float) -> Plan | None:
        """The fastest plan of a case, over the orders of its ranks where they are free.

        None where none was found, which is kept. Raises :class:`InfeasibleError` where parameters alone are
        too much.
        """
        problem = case.problem()
        if any(needs_more(problem, unfit) for unfit in self.unfit):
            return None
        if (lack := self._lacking(problem, deadline)) is not None:
            self._refuse(case, problem, lack, deadline)
            return None
        # some time is for simulating what is found
        kept = _SIMULATING_DRAFT if self.is_draft else _SIMULATING
        until = deadline - kept * max(0.0, deadline - clock_s())
        if self.asked.any_order:
            solved = ordered(case, problem, until, self.stopped)
            found = shortest(solved, case.order, 0.0 if self.stopped.is_set() else deadline)
        else:
            found = [answered(case, problem, until, self.known, self.is_draft)]
        best: Plan | None = None
        table: list[Candidate] = []
        for there, problem, answer in found:
            simulating = 0.0 if self.stopped.is_set() else deadline
            plan = fastest(there, problem, answer, simulating, is_draft=self.is_draft)
            if plan is not None:
                table += plan.candidates
                best = plan if best is None or plan.step_s < best.step_s else best
        if best is None:
            # of several orders, one that is open says that not all are ruled out; else the case's own stands
            self._fail(min(found, key=lambda a: (a[2].proved, a[0].order != case.order)))
            return None
        if not self.is_draft and not self.asked.any_order:  # of several orders, each has a bound of its own
            self.least_s[id(case)] = best.bounds.step_lower_s
        return dataclasses.replace(best, candidates=tuple(table))

    def _lacking(self, problem: Problem, deadline: float) -> Shortage | None:
        """What is short in every order of the ranks that is asked about; None where none is known."""
        is_any = self.asked.any_order and len({s.limit_bytes for s in problem.stages}) > 1
        return between_steps(problem) if is_any else shortage(problem, deadline)

    def _refuse(self, case: Case, problem: Problem, lack: Shortage, deadline: float) -> None:
        """Keeps what a case lacks without any search; raises it where that is room on all ranks together."""
        if lack.what != "all":
            self.lacks[id(case)] = lack
            self._fail((case, problem, Answer(None, HUGE, HUGE)))
            return
        fault = no_room(case, problem, lack, None if self.fault else deadline)
        if lack.static_bytes > lack.room_bytes:
            self.short.append(frozenset(case.ranks))
            self.fault = fault
        raise fault

    def _fail(self, without: Answered) -> None:
        """Keeps a case where nothing was found, rather one that is open."""
        if without[2].proved:
            self.unfit.append(without[1])
        if self.failed is None or self.failed[2].proved:
            self.failed = without

    def _is_short(self, case: Case) -> bool:
        """Whether ranks that have too little room include all of a case's."""
        return any(there.issuperset(case.ranks) for there in self.short)

    def _looked_again(self) -> Plan:
        """A plan, where the look for what comes closest to one finds one; else raises why there is none."""
        tried, failed = self.tried, self.failed
        if self.n_left and (failed is None or failed[2].proved):
            raise UndecidedError(
                f"of {len(tried)} combinations of schedule and stages that were left free, "
                f"{len(tried) - self.n_left} have no plan that fits, and there was no time for the others; "
                "raise time_limit_s, or leave less free"
            )
        if failed is None and self.fault is not None:
            raise self.fault
        case, problem, answer = failed or (tried[-1], tried[-1].problem(), Answer(None, HUGE, 0))
        lack = self.lacks.get(id(case))
        deadline = self.deadline if lack is None else told_by(self.deadline)
        more = 0 if lack is None else lack.each_bytes
        nearest = closest(problem, deadline, is_open=not answer.proved, least_bytes=more)
        plan = None
        if nearest.stage_of is not None and nearest.over_bytes <= 0 and not answer.proved:
            value = problem.bottleneck(problem.loads(nearest.stage_of))
            answer = Answer(nearest.stage_of, value, answer.lower_ns)
            plan = fastest(case, problem, answer, self.deadline, is_draft=self.is_draft)
        if plan is None:
            raise why_none(case, problem, answer, nearest, deadline, lack)
        self.table += plan.candidates
        return plan
