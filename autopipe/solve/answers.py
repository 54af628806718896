"""The least bottleneck of a case, and of all orders of its ranks where that is left free.

Chains of one order are left to ``chains``, whole steps to ``step``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import threading

from .chains import NEAR, chain, contracted
from .definition.answer import Answer, OutOfTime
from .definition.problem import HUGE, Problem
from .definition.relaxed import working
from .definition.trifles import trim
from .lines.sums import least_sum
from .lines.windows import TooMany
from .making.cases import Case, rank_orders
from .proof.memory import least_total_in_room
from .proof.step import least_work_ns
from .ranks.virtual import least_load
from .stopping import clock_s

__all__ = ["Answered", "Known", "answered", "fullest_work_ns", "least_sums_ns", "ordered"]

_FEW_ORDERS = 120
"""Up to so many orders of the ranks are all solved."""

_SWAPS = 60
"""At most so many orders are solved where they are more."""

_ENOUGH = 0.01
"""A draft's bottleneck so near its bound is not looked at longer: costs are not known as well."""

_TRIFLES = 3e-3
"""What is left out of the sums that bound a step comes to this part of a fair share of all work at most."""

Answered = tuple[Case, Problem, Answer]
"""A case, its problem, and the best bottleneck that was found, with what bounds it."""
Known = dict[tuple[object, ...], Answer]
"""Bottlenecks that drafts have found, by case."""


def answered(
    case: Case, problem: Problem, deadline: float, known: Known | None = None, is_draft: bool = False
) -> Answered:
    """A case with its best bottleneck, as far as it is not known; of a draft, one near its bound will do."""
    key = case.schedule, case.n_stages, case.n_microbatches, case.order, case.ranks
    earlier = Answer(None, HUGE, 0) if known is None else known.get(key, Answer(None, HUGE, 0))
    if earlier.bottleneck_ns <= earlier.lower_ns * (1 + _ENOUGH * is_draft):
        return case, problem, earlier
    near = _ENOUGH if is_draft else NEAR
    answer = chain(problem, time_limit_s=max(0.0, deadline - clock_s()), near=near)
    lower = max(answer.lower_ns, min(earlier.lower_ns, answer.bottleneck_ns))
    best = min(answer, earlier, key=lambda a: a.bottleneck_ns)
    answer = dataclasses.replace(best, lower_ns=lower)
    if known is not None:
        known[key] = answer
    return case, problem, answer


def fullest_work_ns(problem: Problem, lower_ns: int, deadline: float) -> int:
    """What the fullest stage works at least where something fits and no bottleneck is under ``lower_ns``.

    Where transfers may be that bottleneck, the least one without any is looked for, in a part of the time.
    """
    known, left_s = least_work_ns(problem, lower_ns), _part(deadline, 4) - clock_s()
    if known or left_s <= 0:
        return known
    with contextlib.suppress(KeyboardInterrupt):
        return chain(working(problem), time_limit_s=left_s).lower_ns
    return 0


def least_sums_ns(
    case: Case, problem: Problem, step_s: float, deadline: float
) -> tuple[float, list[tuple[int, ...]]]:
    """What the largest of the sums that bound a case's steps comes to at least, and chains near that.

    No more than such a sum is in the step that is known; 0 where it is not known, or too much to look through
    in a part of the time. Nor where hosts may be slower than devices: whichever is, its forwards count.
    """
    if case.line is None or problem.has_hosts:
        return 0.0, []
    whole = contracted(working(problem))
    trimmed = trim(whole.problem, _TRIFLES)
    form = whole.problem if trimmed is None else dataclasses.replace(trimmed.problem, allow_empty=True)
    until, most_ns = _part(deadline, 3), case.most_step_ns(step_s)
    total_ns = least_total_in_room(problem, until)
    # items are rounded
    aside = math.ceil(case.aside_ns) + len(problem.items)
    chains: list[tuple[int, ...]] = []
    with contextlib.suppress(OutOfTime, TooMany, KeyboardInterrupt):
        least_ns, found = least_sum(form, case.line, total_ns, most_ns, aside, until)
        for chain_ in found:
            stage_of = whole.expand(chain_ if trimmed is None else trimmed.expand(chain_))
            chains += [stage_of] * problem.is_valid(stage_of)
        return min(least_ns, most_ns), chains
    return 0.0, []


def ordered(case: Case, problem: Problem, deadline: float, stopped: threading.Event) -> list[Answered]:
    """The orders that were solved, by rising bottleneck; each with a bound on all.

    Where the case's own does not meet what no order beats, every order that differs is solved if they are
    few; else swaps of two ranks are tried from the order host by host and from the fastest first. Ctrl-C
    costs the orders that were still to come.
    """
    found = [answered(case, problem, _part(deadline, 3))]
    lower = least_load(problem)
    with contextlib.suppress(KeyboardInterrupt):
        for bound in (_least_of_any, _others):
            is_over = stopped.is_set() or clock_s() > deadline
            if found[0][2].bottleneck_ns > lower and not is_over:
                lower = max(lower, bound(found, lower, deadline, stopped))
    found.sort(key=lambda f: (f[2].bottleneck_ns, f[0].order != case.order))
    return [(c, p, dataclasses.replace(a, lower_ns=lower)) for c, p, a in found]


def _others(found: list[Answered], lower: int, deadline: float, stopped: threading.Event) -> int:
    """Solves other orders than the first that was found, and bounds all of them where all were solved."""
    case = found[0][0]
    count, orders = rank_orders(case.source.cluster, case.source.limits)
    if count > _FEW_ORDERS:
        _swapped(found, lower, deadline, stopped)
        return lower
    for x, order in enumerate(order for order in orders if order != case.order):
        if stopped.is_set() or clock_s() > deadline:
            return lower
        moved = dataclasses.replace(case, order=order)
        found.append(answered(moved, moved.problem(), _part(deadline, count - x)))
    return min(answer.lower_ns for _, _, answer in found)


def _part(deadline: float, n: int) -> float:
    """When the first of so many parts of the time that is left ends."""
    now = clock_s()
    return now + (deadline - now) / n


def _least_of_any(found: list[Answered], lower: int, deadline: float, stopped: threading.Event) -> int:
    """A bottleneck that no order of the ranks beats: where devices are alike, that of the cheapest links."""
    problem = found[0][1]
    if len({(s.speed, s.limit_bytes) for s in problem.stages}) > 1:
        return lower
    stages = tuple(dataclasses.replace(s, nic=-1) for s in problem.stages)
    anywhere = dataclasses.replace(problem, stages=stages, pair_ns=None, link_of=None)
    return chain(anywhere, time_limit_s=max(0.0, _part(deadline, 4) - clock_s())).lower_ns


def _swapped(found: list[Answered], lower: int, deadline: float, stopped: threading.Event) -> None:
    """Orders reached by swapping two ranks while that lowers the bottleneck and it is over the bound."""
    case, _, first = found[0]
    devices = case.source.cluster.devices
    by_speed = tuple(sorted(case.order, key=lambda r: -devices[r].speed))
    budget, seen = (deadline - clock_s()) / _SWAPS, {case.order}

    def visit(order: tuple[int, ...]) -> int:
        seen.add(order)
        moved = dataclasses.replace(case, order=order)
        found.append(answered(moved, moved.problem(), clock_s() + budget))
        return found[-1][2].bottleneck_ns

    best = first.bottleneck_ns, case.order
    for start in (by_speed, by_speed[::-1]):
        if best[0] > lower and start not in seen:
            best = min(best, (visit(start), start))
    improved = best[0] > lower
    while improved:
        improved = False
        for a, b in itertools.combinations(range(len(case.order)), 2):
            order = list(best[1])
            order[a], order[b] = order[b], order[a]
            if tuple(order) in seen:
                continue
            if len(seen) >= _SWAPS or stopped.is_set() or clock_s() > deadline:
                return
            value = visit(tuple(order))
            if value < best[0]:
                best, improved = (value, tuple(order)), value > lower
                break
