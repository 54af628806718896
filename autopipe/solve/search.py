"""From a graph, its costs and a cluster to the plan that simulates fastest among near-optimal chains.

The exact method is left to ``chains``, the definition of a load to ``problem``.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..costs import CostTable
from ..errors import InfeasibleError, InputError
from ..graph import OpGraph
from ..hardware import Cluster
from ..memory import ADAM
from ..plans import Bounds, Candidate, Plan
from ..schedule import NAMES, build, placement
from ..simulator import simulate
from ..units import format_bytes, parse_bytes
from .baselines import Weigh, by_weight, weights_of
from .chains import chain
from .compose import Source, lay_out
from .exact import Answer
from .formulate import Settings, formulate, largest_cut
from .intervals import lightest_chain
from .problem import HUGE, Problem

__all__ = ["solve"]

_SLACK = (0.0, 0.01, 0.03, 0.1)
"""How far over the best bottleneck chains are looked at: a step is more than its slowest stage."""


@dataclasses.dataclass(frozen=True)
class _Case:
    """One schedule, stage count and microbatch count to plan for."""

    source: Source
    schedule: str
    n_stages: int
    n_microbatches: int
    balance: str | Weigh
    deadline: float

    def problem(self) -> Problem:
        """Its integer problem. Raises :class:`InfeasibleError` when the graph has too few pieces."""
        n_ranks = self.source.cluster.n_ranks
        placed = placement(self.schedule, n_ranks, self.n_stages)
        schedule = build(self.schedule, n_ranks, self.n_stages, self.n_microbatches, placement=placed)
        s = self.source
        problem = formulate(s.graph, s.costs, s.cluster, schedule, s.settings)
        most = largest_cut(problem)
        if most < self.n_stages:
            raise InfeasibleError(
                f"{s.graph.model} can be cut into {most} stages at most, fewer than "
                f"n_stages={self.n_stages}; use n_stages={most}, or open a module that is now whole"
            )
        return problem


def solve(
    graph: OpGraph,
    costs: CostTable,
    cluster: Cluster,
    *,
    n_stages: int,
    n_microbatches: int | str,
    schedule: str = "1f1b",
    balance: str | Weigh = "cost",
    memory_limit: str | float | Sequence[str | float] | None = None,
    ties: str = "auto",
    pin: Mapping[str, int] | None = None,
    together: Sequence[Sequence[str]] = (),
    uncut: Sequence[str] = (),
    recompute: str = "never",
    clone: str = "auto",
    overlap: bool = True,
    sender_pays: str = "once",
    optimizer_bytes_per_parameter_byte: float = ADAM,
    time_limit_s: float = 10.0,
) -> Plan:
    """The plan that simulates fastest among chains near the least bottleneck, with a certificate.

    The bottleneck is solved exactly, chains near it are simulated, and so are the uniform and by-parameters
    splits: with ``balance="cost"`` the plan never simulates slower than either.

    Parameters
    ----------
    n_microbatches: how many, at the microbatch size of ``costs``, or ``"auto"`` to pick the step with the
        least time per microbatch among powers of two up to four per stage.
    schedule: a name of ``schedule.NAMES``, or ``"auto"`` to simulate every one that the ranks allow.
    balance: ``"cost"``, ``"parameters"``, ``"uniform"``, or a callable from an op to its weight.
    memory_limit: for every rank, or a sequence of one per rank; beside the devices' own.
    ties: ``"auto"`` and ``"sync"`` price synchronising against keeping users together; ``"colocate"``
        forces the latter (on ranks that hold several stages, it stays a price).
    pin: module path prefix or op name → stage; negative stages count from the end.
    together: groups of module paths or op names that share a stage.
    uncut: values (op names) that must not cross a boundary.
    recompute: ``"never"``, ``"auto"`` (stages that would not fit otherwise) or ``"always"``.
    clone: whether cheap values are computed again where needed: ``"auto"``, ``"never"`` or ``"always"``.
    overlap: whether transfers hide behind work. A stage's load is the larger of the two, else their sum.
    sender_pays: a value sent to several stages costs its sender ``"once"`` or per ``"receiver"``.
    time_limit_s: after it, or on Ctrl-C, the best plan so far is returned with its certified gap.

    Raises :class:`InfeasibleError` when no plan fits, :class:`InputError` for unknown settings.
    """
    settings = Settings(
        ties=_one_of("ties", ties, ("auto", "sync", "colocate")),
        pin=dict(pin or {}),
        together=tuple(tuple(g) for g in together),
        uncut=tuple(uncut),
        recompute=_one_of("recompute", recompute, ("never", "auto", "always")),
        memory_limit=_limits(memory_limit, cluster.n_ranks),
        optimizer_bytes_per_parameter_byte=optimizer_bytes_per_parameter_byte,
        sender_pays=_one_of("sender_pays", sender_pays, ("once", "receiver")),
        overlap=overlap,
        clone=_one_of("clone", clone, ("auto", "never", "always")),
        training=schedule != "forward-only",
    )
    source = Source(graph, costs, cluster, settings)
    deadline = time.perf_counter() + time_limit_s
    best: tuple[float, Plan] | None = None
    table: list[Candidate] = []
    fault: InfeasibleError | None = None
    for name, n in _choices(schedule, cluster.n_ranks, n_stages, n_microbatches):
        case = _Case(source, name, n_stages, n, balance, deadline)
        try:
            plan = _solve_case(case)
        except InfeasibleError as error:
            fault = error
            table.append(Candidate(f"{name}, {n} microbatches", name, n_stages, n, 0.0, 0, False))
            continue
        table += plan.candidates
        if best is None or plan.step_s / n < best[0]:
            best = plan.step_s / n, plan
    if best is None:
        raise fault or InfeasibleError(
            f"no schedule places {n_stages} stages on {cluster.n_ranks} ranks; use a multiple of the ranks"
        )
    ranked = sorted(table, key=lambda c: (not c.feasible, c.step_s / c.n_microbatches))
    return dataclasses.replace(best[1], candidates=tuple(ranked))


def _solve_case(case: _Case) -> Plan:
    problem = case.problem()
    graph = case.source.graph
    splits: list[tuple[str, tuple[int, ...]]] = []
    answer = chain(problem, time_limit_s=max(0.1, case.deadline - time.perf_counter()))
    if answer.stage_of is None and case.balance == "cost":
        raise _infeasible(case, problem)
    if case.balance == "cost":
        assert answer.stage_of is not None
        splits.append(("best bottleneck", answer.stage_of))
        splits += [(f"within {s:.0%}", c) for s, c in _near(problem, answer)]
        names: tuple[str | Weigh, ...] = ("uniform", "parameters")
    else:
        names = (case.balance,)
    for name in names:
        made = by_weight(problem, weights_of(graph, problem, name))
        if made is not None:
            splits.append((name if isinstance(name, str) else "callable", made))
    return _fastest(case, problem, answer, splits)


def _near(problem: Problem, answer: Answer) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Chains over the given order with bottlenecks near the best and the least total load."""
    seen = {answer.stage_of}
    for slack in _SLACK:
        limit = min(round(answer.bottleneck_ns * (1 + slack)), HUGE - 1)
        found = lightest_chain(problem, range(len(problem.items)), limit)
        if found is not None and found not in seen:
            seen.add(found)
            yield slack, found


def _fastest(
    case: _Case, problem: Problem, answer: Answer, splits: Sequence[tuple[str, tuple[int, ...]]]
) -> Plan:
    """The split that simulates fastest among those that fit; the others become candidates."""
    plans, rows = [], []
    for label, stage_of in splits:
        bottleneck = problem.bottleneck(problem.loads(stage_of))
        plan = _plan(case, problem, answer, stage_of)
        rows.append(
            Candidate(
                f"{case.schedule}, {case.n_microbatches} microbatches: {label}",
                case.schedule,
                case.n_stages,
                case.n_microbatches,
                plan.step_s,
                max(s.memory_bytes for s in plan.stages),
                bottleneck < HUGE,
            )
        )
        if bottleneck < HUGE:
            plans.append(plan)
    if not plans:
        raise _infeasible(case, problem)
    best = min(plans, key=lambda p: p.step_s)
    return dataclasses.replace(best, candidates=tuple(rows))


def _plan(case: _Case, problem: Problem, answer: Answer, stage_of: Sequence[int]) -> Plan:
    s = case.source
    layout = lay_out(s, problem, stage_of)
    reached = problem.bottleneck(problem.loads(stage_of)) % HUGE
    lower = min(answer.lower_ns, reached) if answer.lower_ns < HUGE else 0
    plan = Plan(
        s.graph.model,
        s.graph.digest,
        layout.stages,
        layout.boundaries,
        layout.ties,
        case.schedule,
        case.n_microbatches,
        0.0,
        Bounds(reached / 1e9, lower / 1e9, 0.0, reached <= lower),
        s.cluster,
        (),
        _written(case),
    )
    step_s = simulate(plan).step_s
    speeds = sum(d.speed for d in s.cluster.devices)
    # Only work occupies a rank in the simulated step, so only work bounds it.
    least = min(case.n_microbatches * problem.total_ns / 1e9 / speeds * (1 - 1e-6), step_s)
    return dataclasses.replace(
        plan, step_s=step_s, bounds=dataclasses.replace(plan.bounds, step_lower_s=least)
    )


def _written(case: _Case) -> dict[str, Any]:
    """The settings that a plan keeps."""
    s, costs = case.source.settings, case.source.costs
    return {
        "balance": case.balance if isinstance(case.balance, str) else "callable",
        "ties": s.ties,
        "pin": dict(s.pin),
        "together": [list(group) for group in s.together],
        "uncut": list(s.uncut),
        "clone": s.clone,
        "sender_pays": s.sender_pays,
        "recompute": s.recompute,
        "overlap": s.overlap,
        "memory_limit": _limit_written(s.memory_limit),
        "optimizer_bytes_per_parameter_byte": s.optimizer_bytes_per_parameter_byte,
        "optimizer_s_per_byte": costs.optimizer_s_per_byte,
        "costs": costs.source,
        "dims": dict(costs.dims),
        "versions": dict(costs.versions),
    }


def _infeasible(case: _Case, problem: Problem) -> InfeasibleError:
    """Why nothing fits, and the memory per rank that would."""
    loose = dataclasses.replace(
        problem, stages=tuple(dataclasses.replace(s, limit_bytes=HUGE) for s in problem.stages)
    )
    answer = chain(loose, time_limit_s=1.0)
    if answer.stage_of is None:
        return InfeasibleError(
            f"no {case.n_stages}-stage plan meets the pins: {dict(case.source.settings.pin)} leaves a stage "
            f"empty or turns data backwards; drop a pin"
        )
    loads = loose.loads(answer.stage_of)
    over = max(range(case.n_stages), key=lambda s: loads[s].memory_bytes - problem.stages[s].limit_bytes)
    need, limit = loads[over].memory_bytes, problem.stages[over].limit_bytes
    enough = max(load.memory_bytes for load in loads)
    hint = "" if case.source.settings.recompute != "never" else ", or recompute='auto'"
    return InfeasibleError(
        f"no {case.n_stages}-stage plan fits: the balanced one needs {format_bytes(need)} in stage {over}, "
        f"limit {format_bytes(limit)} ({problem.stages[over].in_flight} microbatches in flight); "
        f"a limit of {format_bytes(enough)} per rank fits{hint}, or use more stages"
    )


def _choices(
    schedule: str, n_ranks: int, n_stages: int, n_microbatches: int | str
) -> Iterator[tuple[str, int]]:
    """The schedules and microbatch counts to try, those that cannot be placed left out."""
    names = [n for n in NAMES if n != "forward-only"] if schedule == "auto" else [schedule]
    if n_microbatches == "auto":
        counts = [1 << i for i in range((4 * n_stages).bit_length())]
    elif isinstance(n_microbatches, int):
        counts = [n_microbatches]
    else:
        raise InputError(f"n_microbatches is {n_microbatches!r}; use a number of at least 1 or 'auto'")
    for name, n in itertools.product(names, counts):
        if schedule == "auto":
            try:
                build(name, n_ranks, n_stages, n)
            except InputError:
                continue
        yield name, n


def _limits(given: str | float | Sequence[str | float] | None, n_ranks: int) -> tuple[int, ...]:
    """Bytes per rank, none where nothing is asked."""
    if given is None:
        return ()
    if isinstance(given, (str, int, float)):
        return (parse_bytes(given),) * n_ranks
    if len(given) != n_ranks:
        raise InputError(
            f"memory_limit has {len(given)} entries for {n_ranks} ranks; give one for all, or one per rank"
        )
    return tuple(parse_bytes(limit) for limit in given)


def _limit_written(limits: Sequence[int]) -> int | list[int] | None:
    if len(set(limits)) <= 1:
        return next(iter(limits), None)
    return list(limits)


def _one_of(what: str, given: str, known: tuple[str, ...]) -> str:
    if given not in known:
        raise InputError(f"{what} is {given!r}; use one of {', '.join(map(repr, known))}")
    return given
