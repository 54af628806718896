"""The best chain of a problem with a certificate: contract, first answers, proof.

Pricing whole steps is left to ``search``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from .definition.answer import Answer, OutOfTime
from .definition.contract import Contraction, contract, merge
from .definition.problem import HUGE, Item, Problem, Share, memory_bytes
from .definition.relaxed import all_received, cheapest, holds_less
from .definition.trifles import Trimmed, trim
from .lines.exact import glance, prove
from .lines.intervals import best_chain, near_chain
from .lines.moves import fitting, improve
from .lines.orders import orders
from .proof.bounds import at_bound, lower_bound
from .proof.branch import close, is_small
from .proof.filling import can_fill
from .proof.memory import least_in_room, part_with_room
from .ranks.virtual import several
from .stopping import GRACE_S, clock_s, interrupts

__all__ = ["NEAR", "chain", "contracted"]

_CLOSING = 0.4
"""Share of the time kept for placing items one by one where loads depend on each other and items are few."""

_RELAXING = 0.6
"""Share of the time for the cheapest prices, where hosts may be slower than their devices, or what these
prices leave out may not fit."""

_ROUGHLY = 0.8
"""The same where an answer near the bound will do: what is found is seldom moved then."""

_TRIMMED = 0.8
"""Share of the time for the problem without its trifles."""

NEAR = 1e-4
"""An answer so near its bound is not looked at longer where that takes more than a glance."""


def chain(problem: Problem, *, time_limit_s: float = 10.0, near: float = NEAR) -> Answer:
    """The assignment of items to stages with the least bottleneck, and a bound that none beats.

    Of large problems an answer less than ``near`` above the bound, as a share of it, is looked at no longer.
    Items may come in any order; sets in a cycle are kept together. An answer without an assignment and with
    a proof says that no chain fits memory and pins. Ctrl-C returns the best so far, and is raised while there
    is none. Deterministic unless the time limit cuts it short.
    """
    with interrupts() as stopped:
        deadline = clock_s() + (0.0 if stopped.is_set() else time_limit_s)
        if problem.is_separable:
            answer = _separable(problem, deadline, stopped, near)
        else:
            answer = _relaxed(problem, deadline, stopped, near)
    if answer.stage_of is None and stopped.is_set():
        raise KeyboardInterrupt
    return answer


def _separable(problem: Problem, deadline: float, stopped: threading.Event, near: float) -> Answer:
    """Where each stage's load is its own: first answers, then the proof."""
    whole = contracted(problem)
    if not can_fill(whole.problem) or part_with_room(whole.problem, deadline) < 1:
        return Answer(None, HUGE, HUGE)
    lower = least_in_room(whole.problem, lower_bound(whole.problem), HUGE, deadline)
    best = Answer(None, HUGE, lower)
    try:
        for found in _trimmed(whole.problem, best, deadline, stopped, near):
            best = found
        if not _is_enough(whole.problem, best, near) and not stopped.is_set():
            for found in first_answers(whole.problem, best, deadline):
                best = found
            best = best if best.proved else prove(whole.problem, best, deadline)
    except OutOfTime:
        pass
    except KeyboardInterrupt:
        if best.stage_of is None:
            raise
    stage_of = whole.expand(best.stage_of) if best.stage_of is not None else None
    return Answer(stage_of, best.bottleneck_ns, best.lower_ns)


def _after(share: float, deadline: float) -> float:
    """When this share of the time that is left is over."""
    now = clock_s()
    return now + share * max(0.0, deadline - now)


def _is_near(answer: Answer, near: float) -> bool:
    return answer.bottleneck_ns <= answer.lower_ns * (1 + near)


def _is_enough(problem: Problem, answer: Answer, near: float) -> bool:
    """Whether an answer is looked at no longer: small problems are, until it is proved."""
    return answer.proved or (_is_near(answer, near) and not is_small(problem))


def _trimmed(
    problem: Problem, known: Answer, deadline: float, stopped: threading.Event, near: float
) -> Iterator[Answer]:
    """Ever better answers of the problem without its trifles, with them put back, and at last its bound.

    In the bound any stage may be empty of what is left, as it may hold trifles; in the answers none may.
    Most often the best is the same: without stages that may be empty it is looked for where it is not.
    """
    trimmed = trim(problem)
    if trimmed is None:
        return
    until, best = _after(_TRIMMED, deadline), known
    loose = dataclasses.replace(trimmed.problem, allow_empty=True)
    for form in (loose, trimmed.problem):
        with contextlib.suppress(OutOfTime):
            for best in first_answers(form, known, until):
                yield _put_back(trimmed, best, known)
            best = best if best.proved else prove(form, best, until)
        if form is loose:
            known = dataclasses.replace(known, lower_ns=max(known.lower_ns, best.lower_ns))
        if best.stage_of is None or stopped.is_set():
            return
        if trimmed.problem.is_valid(best.stage_of):
            break
    best = _put_back(trimmed, best, known)
    yield best
    if _is_near(best, NEAR) and not stopped.is_set():
        yield glance(problem, best, deadline)


def _put_back(trimmed: Trimmed, found: Answer, known: Answer) -> Answer:
    """An answer of the whole problem from one without its trifles, where that fits; else what is known."""
    if found.stage_of is None or not trimmed.problem.is_valid(found.stage_of):
        return known
    stage_of = trimmed.expand(found.stage_of)
    value = trimmed.whole.bottleneck(trimmed.whole.loads(stage_of))
    return Answer(stage_of, value, known.lower_ns) if value < HUGE else known


def _relaxed(problem: Problem, deadline: float, stopped: threading.Event, near: float) -> Answer:
    """Where a stage's load depends on others, or is not a sum: solved with the least it can be, then scored.

    Cheapest prices bound the true ones from below, and devices or hosts alone the slower of the two, so that
    optimum is a bound; moves of single items then make the most of the true ones, and small problems are
    closed by ``branch``. Ranks of several stages are left to ``virtual``.
    """
    whole = merge(without_idle_limits(problem), ())
    if not can_fill(whole.problem):
        return Answer(None, HUGE, HUGE)
    closing = _CLOSING if is_small(whole.problem) else 0.0
    until = deadline - closing * max(0.0, deadline - clock_s())
    answer = _bounded(whole.problem, until, stopped, near)
    with contextlib.suppress(KeyboardInterrupt):
        answer = answer if stopped.is_set() else close(whole.problem, answer, deadline)
    stage_of = whole.expand(answer.stage_of) if answer.stage_of is not None else None
    return dataclasses.replace(answer, stage_of=stage_of)


def _bounded(problem: Problem, deadline: float, stopped: threading.Event, near: float) -> Answer:
    if not problem.one_stage_per_rank:
        return several(problem, deadline)
    relaxing = _RELAXING if near <= NEAR else _ROUGHLY
    share = relaxing if problem.has_hosts or holds_less(problem) else 1.0
    left_s = max(0.0, share * (deadline - clock_s()))
    answer = chain(cheapest(problem), time_limit_s=left_s, near=near)
    if answer.stage_of is None:
        return answer
    if problem.has_hosts and not stopped.is_set():
        answer = _at_both_paces(problem, answer, deadline)
    value = problem.bottleneck(problem.loads(answer.stage_of or ()))
    answer = dataclasses.replace(answer, bottleneck_ns=value)
    if not _is_enough(problem, answer, near) and not stopped.is_set():
        with contextlib.suppress(KeyboardInterrupt):
            better = improve(problem, answer.stage_of or (), deadline)
            value = problem.bottleneck(problem.loads(better))
            answer = dataclasses.replace(answer, stage_of=better, bottleneck_ns=value)
    return answer if value < HUGE else _in_room(problem, answer.lower_ns, deadline, stopped)


def _in_room(problem: Problem, lower_ns: int, deadline: float, stopped: threading.Event) -> Answer:
    """Any assignment that fits, where the cheapest prices have one that does not at the true ones.

    Where every value is received, all that a stage holds is its own, and none of it less than it may be.
    """
    none = Answer(None, HUGE, lower_ns)
    if stopped.is_set():
        return none
    with contextlib.suppress(KeyboardInterrupt):
        received = cheapest(all_received(problem))
        found = chain(received, time_limit_s=_RELAXING * max(0.0, deadline - clock_s())).stage_of
        if found is None or problem.bottleneck(problem.loads(found)) >= HUGE:
            tries = (fitting(problem, order, deadline) for order in orders(problem))
            found = next((x for x in tries if x is not None), None)
        if found is not None:
            found = improve(problem, found, deadline)
            return Answer(found, problem.bottleneck(problem.loads(found)), lower_ns)
    return none


def _at_both_paces(problem: Problem, known: Answer, deadline: float) -> Answer:
    """The best of what is known and the chains over intervals of several orders, at both paces."""
    best, value = known.stage_of, problem.bottleneck(problem.loads(known.stage_of or ()))
    with contextlib.suppress(OutOfTime, KeyboardInterrupt):
        for order in orders(problem):
            found = best_chain(problem, order, min(value, HUGE) - 1, deadline)
            at = HUGE if found is None else problem.bottleneck(problem.loads(found[1]))
            if found is not None and at < value:
                best, value = found[1], at
    return dataclasses.replace(known, stage_of=best)


def first_answers(problem: Problem, known: Answer, deadline: float) -> Iterator[Answer]:
    """Ever better chains than what is known, over intervals of several orders, as merged under each."""
    best = dataclasses.replace(known, lower_ns=max(known.lower_ns, lower_bound(problem)))
    under, before = Contraction(problem, tuple(range(len(problem.items)))), None
    while before is None or under.part_of != before.part_of:
        for order in orders(under.problem):
            found = _first_chain(under.problem, order, best, deadline)
            if found is not None:
                stage_of = under.expand(found[1])
                value = problem.bottleneck(problem.loads(stage_of))
                is_first = best.stage_of is None
                best = min(best, Answer(stage_of, value, best.lower_ns), key=lambda a: a.bottleneck_ns)
                if is_first:
                    yield best
                    best = glance(problem, best, deadline)
            yield best
            if best.proved or clock_s() > deadline:
                return
        if best.stage_of is None:
            for order in orders(problem):
                moved = fitting(problem, order, deadline)
                if moved is not None:
                    value = problem.bottleneck(problem.loads(moved))
                    best = Answer(moved, value, best.lower_ns)
                if moved is not None or clock_s() > deadline:
                    break
        before = under
        if best.stage_of is not None:
            under = at_bound(problem, best.bottleneck_ns - 1)
            lower = max(best.lower_ns, min(lower_bound(under.problem), best.bottleneck_ns))
            best = Answer(best.stage_of, best.bottleneck_ns, lower)
            yield best


def _first_chain(
    problem: Problem, order: Sequence[int], best: Answer, deadline: float
) -> tuple[int, tuple[int, ...]] | None:
    """The best chain of an order that is better than the best known.

    Without one, any answer is worth more than the time, though not much.
    """
    if best.stage_of is not None:
        return best_chain(problem, order, best.bottleneck_ns - 1, deadline)
    return near_chain(problem, order, best.lower_ns, max(deadline, clock_s() + GRACE_S))


def contracted(problem: Problem) -> Contraction:
    """The problem in a topological order without items that are free to follow a neighbour."""
    whole = merge(without_idle_limits(problem), ())
    return whole.then(contract(whole.problem))


def without_idle_limits(problem: Problem) -> Problem:
    """The problem without bytes where even a rank whose stages hold everything stays within every limit."""
    several = max(map(len, problem.stages_of.values()))
    parts: tuple[Item | Share, ...] = (*problem.items, *problem.shares * several)
    static, saved = sum(p.static_bytes for p in parts), sum(p.saved_bytes for p in parts)
    peak = max(p.workspace_bytes for p in parts)
    received = sum(n.n_bytes * min(several, len(n.consumers)) for n in problem.nets)
    saved += received * problem.holds_received
    saved += sum(n.kept_bytes * min(several, len(n.consumers)) for n in problem.nets)
    peak = max([peak, *(n.again_bytes for n in problem.nets)])
    sent = sum(n.sent_bytes for n in problem.nets)
    most = [max(memory_bytes(s.in_flight, static, saved, peak, received, sent)) for s in problem.stages]
    limits = [s.limit_bytes for s in problem.stages]
    if problem.recompute == "always" or any(m > b for m, b in zip(most, limits, strict=True)):
        return problem
    free: dict[str, Any] = {"static_bytes": 0, "saved_bytes": 0, "workspace_bytes": 0}
    return dataclasses.replace(
        problem,
        items=tuple(dataclasses.replace(i, **free) for i in problem.items),
        shares=tuple(dataclasses.replace(s, **free) for s in problem.shares),
        nets=tuple(n.without_bytes() for n in problem.nets),
        stages=tuple(dataclasses.replace(s, limit_bytes=HUGE) for s in problem.stages),
        recompute="never",
    )
