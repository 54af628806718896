"""From near-optimal chains of one case to the plan whose step simulates fastest.

Finding the chains' bound is left to ``chains``, choosing between cases to ``search``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ..plans import Bounds, Candidate, Plan
from ..simulator import plan_schedule, simulate
from .answers import Answered, fullest_work_ns, least_sums_ns
from .definition.answer import Answer, OutOfTime
from .definition.problem import HUGE, Problem, StageLoad
from .lines.intervals import lightest_chains
from .lines.moves import carried, neighbours, past
from .lines.orders import orders
from .making.baselines import Weigh, by_weight, weights_of
from .making.cases import Case
from .making.compose import lay_out
from .making.tails import tail_words
from .stopping import clock_s

__all__ = ["as_run", "fastest", "plan_of", "shortest"]

_SLACK = (0.0, 0.01, 0.03, 0.1)
"""How far over the best bottleneck chains are looked at: a step is more than its slowest stage."""

_CLIMBED = 3
"""So many of the fastest plans are improved by moves, of those that are as fast as each other the first."""

_BEHIND = 0.01
"""One that is so much slower than the fastest is not: moves gain less, and cost as much as the rest."""

_CLOSE = 5e-3
"""Where the fastest is so near the bound on all steps, it alone is improved."""

_WORTH = 1e-4
"""A move that shortens a step by less than this part of it is not made: each is followed by a look at all."""

_MOVES = 200
"""At most so many moves are simulated for each of them."""

_KEPT_ORDERS = 6
"""So many orders of ranks are looked at closely."""

_ORDERING = 1 / 4
"""Share of the time for choosing these by a step each."""

_WAYS = neighbours, past, carried
"""The moves, those of few items first."""

_MANY = 2_000
"""With more items, chains are of the given order alone, and only single items move."""

_SIMULATED = 1 << 16
"""Microbatches through stages that the moves of one plan are simulated for: longer steps get fewer moves."""

Split = tuple[str, tuple[int, ...]]


def fastest(
    case: Case, problem: Problem, answer: Answer, deadline: float, *, is_draft: bool = False
) -> Plan | None:
    """The split that simulates fastest among those that fit; the others are its candidates. None fits: None.

    With ``balance="cost"``: the best bottleneck, chains near it, the splits people make by hand, and what
    moving items and stages makes of the fastest of all these; a draft has neither moves nor chains near the
    best. Else the balance asked for alone.
    """
    started = clock_s()
    rated: list[tuple[Plan, tuple[int, ...]]] = []
    rows: list[Candidate] = []
    n_climbed = _CLIMBED if case.balance == "cost" and not is_draft else 0

    def rate(label: str, stage_of: tuple[int, ...]) -> None:
        loads = problem.loads(stage_of)
        plan = plan_of(case, problem, answer, stage_of, loads)
        rows.append(_row(f"{case.label}: {label}", plan, problem, loads))
        if rows[-1].feasible:
            rated.append((plan, stage_of))

    try:
        for label, stage_of in _in_time(_splits(case, problem, answer, deadline, is_draft)):
            if rated and _is_late(started, len(rows), deadline):
                break
            rate(label, stage_of)
    except KeyboardInterrupt:
        # Ctrl-C costs the splits and moves that were still to come
        if not rated:
            raise
        n_climbed, deadline = 0, min(deadline, clock_s())
    if not rated:
        return None
    rated.sort(key=lambda r: _rank(r[0]))
    best, listed = rated[0][0], {stage_of for _, stage_of in rated}
    pace_s = (clock_s() - started) / len(rows)
    sums_ns = least_s = 0.0
    # Ctrl-C here costs the moves and the bound, not the plan
    with contextlib.suppress(KeyboardInterrupt):
        if not is_draft:
            sums_ns, near = least_sums_ns(case, problem, best.step_s, deadline)
            for stage_of in near if n_climbed else ():
                if clock_s() + pace_s > deadline:
                    break
                if stage_of not in listed:
                    listed.add(stage_of)
                    rate("least sums", stage_of)
            rated.sort(key=lambda r: _rank(r[0]))
            best = rated[0][0]
        if sums_ns:
            least_s = case.least_step_in_room_s(problem, 0, deadline, sums_ns)
            if best.step_s <= least_s * (1 + _CLOSE):
                n_climbed = min(n_climbed, 1)
        before_s = 0.0
        for plan, stage_of in rated[:n_climbed]:
            if plan.step_s > best.step_s * (1 + _BEHIND):
                break
            if plan.step_s <= before_s * (1 + _WORTH):
                continue
            before_s = plan.step_s
            better, moved = _climbed(case, problem, answer, plan, stage_of, deadline - pace_s)
            if moved not in listed:
                listed.add(moved)
                rows.append(_row(f"{case.label}: moved", better, problem, problem.loads(moved)))
                best = min(best, better, key=_rank)
        if not is_draft and not sums_ns:
            fullest_ns = fullest_work_ns(problem, answer.lower_ns, deadline)
            least_s = case.least_step_in_room_s(problem, fullest_ns, deadline)
    least_s = min(max(least_s, best.bounds.step_lower_s), best.step_s)
    bounds = dataclasses.replace(best.bounds, step_lower_s=least_s)
    return dataclasses.replace(best, bounds=bounds, candidates=tuple(rows))


def _rank(plan: Plan) -> tuple[float, float]:
    """What plans are chosen by: the step, and where steps are equal but for rounding, the fullest stage."""
    return float(f"{plan.step_s:.9g}"), max(stage.memory_bytes for stage in plan.stages)


def _in_time(splits: Iterator[Split]) -> Iterator[Split]:
    """The splits until looking for one takes too long."""
    with contextlib.suppress(OutOfTime):
        yield from splits


def _is_late(started: float, n_done: int, deadline: float) -> bool:
    """Whether one more simulation like those done would end after the deadline."""
    now = clock_s()
    return now + (now - started) / max(1, n_done) > deadline


def _row(label: str, plan: Plan, problem: Problem, loads: Sequence[StageLoad]) -> Candidate:
    fullest = max(
        problem.rank_bytes(rank, [loads[s] for s in own]) for rank, own in problem.stages_of.items()
    )
    fits = problem.bottleneck(loads) < HUGE
    return Candidate(label, plan.schedule, plan.n_stages, plan.n_microbatches, plan.step_s, fullest, fits)


def _splits(case: Case, problem: Problem, answer: Answer, deadline: float, is_draft: bool) -> Iterator[Split]:
    names: tuple[str | Weigh, ...] = (case.balance,)
    if case.balance == "cost":
        names = ("uniform", "parameters")
        if answer.stage_of is not None:
            yield "best bottleneck", answer.stage_of
    for name in names:
        made = by_weight(problem, weights_of(case.source.graph, problem, name))
        if made is not None:
            yield name if isinstance(name, str) else "callable", made
    if case.balance == "cost" and answer.stage_of is not None and not is_draft:
        yield from _near(case, problem, answer, deadline)


def _is_free(case: Case, problem: Problem) -> bool:
    """Whether other orders than the recorded one are looked at.

    Not where a layer is called again: inputs of other sizes may go round a loop more often, which a cut
    through its last round alone has no place for.
    """
    if len(problem.items) > _MANY:
        return False
    layers = [(op.target, op.parameters) for op in case.source.graph.compute if op.parameters]
    return len(set(layers)) == len(layers)


def _near(case: Case, problem: Problem, answer: Answer, deadline: float) -> Iterator[Split]:
    """Chains over several orders with bottlenecks near the best and the least total load."""
    seen = {answer.stage_of}
    worst = max(load.load_ns for load in problem.loads(answer.stage_of or ()))
    for order in orders(problem) if _is_free(case, problem) else (range(len(problem.items)),):
        limits = [min(round(worst * (1 + slack)), HUGE - 1) for slack in _SLACK]
        chains = lightest_chains(problem, order, limits, deadline)
        for slack, found in zip(_SLACK, chains, strict=True):
            if found is not None and found not in seen:
                seen.add(found)
                yield f"bottleneck within {slack:.0%}" if slack else "best bottleneck, least work", found


def _climbed(
    case: Case, problem: Problem, answer: Answer, plan: Plan, stage_of: tuple[int, ...], deadline: float
) -> tuple[Plan, tuple[int, ...]]:
    """The plan after every move that makes its step shorter: of an item, what goes with it, or a stage."""
    ways = _WAYS if _is_free(case, problem) else _WAYS[:1]
    left, improved = min(_MOVES, _SIMULATED // (problem.n_stages * case.n_microbatches)), True
    while improved:
        improved = False
        for moved in itertools.chain(*(way(problem, stage_of) for way in ways)):
            if left == 0 or clock_s() > deadline:
                return plan, stage_of
            left -= 1
            loads = problem.loads(moved)
            if problem.bottleneck(loads) >= HUGE:
                continue
            after = plan_of(case, problem, answer, moved, loads)
            if after.step_s < plan.step_s * (1 - _WORTH):
                plan, stage_of, improved = after, moved, True
                break
    return plan, stage_of


def shortest(found: Sequence[Answered], own: tuple[int, ...], deadline: float) -> list[Answered]:
    """The orders of ranks whose best bottlenecks' steps are shortest, in a part of the time; and one's own.

    The least bottleneck says little of them: where ranks are unlike, what waits for a slow one is its place.
    Yet the shortest of the least bottleneck is among them, and of orders with one step and one bottleneck,
    which mostly differ in alike ranks' names, a second only where no others are left. Ctrl-C costs the steps
    that were still to come.
    """
    until = clock_s() + _ORDERING * max(0.0, deadline - clock_s())
    steps_s = [math.inf] * len(found)
    with contextlib.suppress(KeyboardInterrupt):
        for x, (case, problem, answer) in enumerate(found):
            if x and clock_s() > until:
                break
            if answer.stage_of is not None:
                loads = problem.loads(answer.stage_of)
                steps_s[x] = plan_of(case, problem, answer, answer.stage_of, loads).step_s
    ranked = sorted(range(len(found)), key=steps_s.__getitem__)
    bottlenecks = [answer.bottleneck_ns for _, _, answer in found]
    least = min(ranked, key=bottlenecks.__getitem__)
    unlike = set({(f"{steps_s[x]:.9g}", bottlenecks[x]): x for x in reversed(ranked)}.values())
    kept = sorted(ranked, key=lambda x: (x != least, x not in unlike))[:_KEPT_ORDERS]
    return [found[x] for x in ranked if x in kept or found[x][0].order == own]


def plan_of(
    case: Case, problem: Problem, answer: Answer, stage_of: Sequence[int], loads: Sequence[StageLoad]
) -> Plan:
    s = case.source
    layout = lay_out(s, problem, stage_of, loads)
    reached = problem.bottleneck(loads) % HUGE
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
        degrees=s.costs.degrees,
    )
    step_s = simulate(plan).step_s
    least = min(case.least_step_s, step_s)
    return dataclasses.replace(
        plan, step_s=step_s, bounds=dataclasses.replace(plan.bounds, step_lower_s=least)
    )


def as_run(plan: Plan) -> Plan:
    """The plan with the microbatches that its schedule has in flight, which a cost-aware one alone decides.

    It is made from the stages' times, and they are cut for one of equal times.
    """
    in_flight = plan_schedule(plan).in_flight
    if in_flight == tuple(stage.in_flight for stage in plan.stages):
        return plan
    stages = (
        dataclasses.replace(s, in_flight=n, memory_bytes=s.memory_bytes + (n - s.in_flight) * s.saved_bytes)
        for s, n in zip(plan.stages, in_flight, strict=True)
    )
    return dataclasses.replace(plan, stages=tuple(stages))


def _written(case: Case) -> dict[str, Any]:
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
        "device_order": s.device_order,
        "recompute": s.recompute,
        "overlap": s.overlap,
        "memory_limit": _limit_written(case.source.limits),
        "optimizer_bytes_per_parameter_byte": s.optimizer_bytes_per_parameter_byte,
        "optimizer_s_per_byte": costs.optimizer_s_per_byte,
        "optimizer_s_per_tensor": costs.optimizer_s_per_tensor,
        "start_s": costs.start_s,
        "jitter_s": costs.jitter_s,
        "alone": costs.alone,
        "costs": costs.source,
        "costs_of": costs.ops,
        "dims": dict(costs.dims),
        "versions": dict(costs.versions),
        "ranks": list(case.ranks),
        **(
            {"tail": words}
            if (words := tail_words(case.source.graph, case.n_microbatches, s.loss_on))
            else {}
        ),
        **({"loss_on": s.loss_on} if s.loss_on == "batch" else {}),
    }


def _limit_written(limits: Sequence[int]) -> int | list[int] | None:
    if len(set(limits)) <= 1:
        return next(iter(limits), None)
    return list(limits)
