"""Why no plan fits: which constraint, where, by how much, and the smallest change that would do.

Finding plans is left to ``search``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ..errors import InfeasibleError, UndecidedError
from ..units import format_bytes
from .chains import chain
from .definition.answer import Answer
from .definition.problem import HUGE, Problem
from .making.cases import Case
from .making.formulate import largest_cut
from .proof.memory import part_with_room
from .stopping import clock_s

__all__ = ["Closest", "Shortage", "closest", "no_room", "shortage", "why_none"]

_STEPS = 14
"""Halvings of the memory looked for: within a ten thousandth of the fullest rank's."""

_LEAST_S = 0.02
"""What one look is given at least."""

_MORE_STAGES = 8
"""So many more stages than asked for are looked at, and as many doublings."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shortage:
    """Bytes that all ranks together hold at least, between steps and of activations, and their room."""

    static_bytes: int
    kept_bytes: int
    room_bytes: int


def shortage(problem: Problem, deadline: float) -> Shortage | None:
    """What no plan can do without, where that is too much for all ranks together; else None.

    Each item's and each share's static bytes count once, whatever is computed again and however fine the cut.
    So does what each microbatch in flight keeps beside them, wherever that is least (:func:`part_with_room`),
    pins aside: what has no room where it is pinned is no shortage of all ranks.
    """
    limits = {s.rank: s.limit_bytes for s in problem.stages}
    static, room = sum(p.static_bytes for p in problem.parts), sum(limits.values())
    if static > room:
        return Shortage(static, 0, room)
    if any(i.first > 0 or i.last >= 0 for i in problem.items):
        anywhere = tuple(dataclasses.replace(i, first=0, last=-1) for i in problem.items)
        problem = dataclasses.replace(problem, items=anywhere)
    part = part_with_room(problem, deadline)
    return Shortage(static, math.floor(room / part) - static, room) if 0 < part < 1 else None


def no_room(case: Case, problem: Problem, short: Shortage, deadline: float | None) -> InfeasibleError:
    """The error where what must be held is too much for all ranks together, with the arithmetic.

    More stages are told of where the graph can be cut into as many. Whether recomputing would do is looked
    for until the deadline, if there is one.
    """
    static, room, n = short.static_bytes, short.room_bytes, len(case.source.cluster.devices)
    needed, more, again = static, "and that is before any activation", ""
    if static <= room:
        needed += short.kept_bytes
        more = f"and what microbatches in flight keep is {format_bytes(short.kept_bytes)} at least"
        if case.source.settings.recompute == "never":
            found = () if deadline is None else _recomputing(case, deadline)
            again = "; " + next(iter(found), "recompute='auto' keeps less")
    per_rank, rest = divmod(case.n_stages, n)
    enough = -(-needed * n // max(room, 1))
    n_stages = enough * (1 if rest else per_rank)
    stages = f"{enough} ranks" if rest else f"n_stages={n_stages} on as many ranks like these"
    or_more = f"{stages}, or " if room and n_stages <= largest_cut(problem) else ""
    return InfeasibleError(
        f"no {case.n_stages}-stage plan fits: parameters, gradients and optimizer state take "
        f"{format_bytes(static)}, the {n} ranks hold {format_bytes(room)} together, {more}; at least "
        f"{or_more}{format_bytes(-(-needed // n))} on each rank would be needed{again}",
        finer_may_help=static <= room and case.source.settings.recompute == "auto",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Closest:
    """The assignment found to be least over its limits, and the bytes it is over: none where it fits.

    Without one, whether it ``is_proved`` that there is none however much memory ranks have.
    """

    stage_of: tuple[int, ...] | None
    over_bytes: int = 0
    is_proved: bool = False


def closest(problem: Problem, deadline: float, *, is_open: bool) -> Closest:
    """What comes closest to fitting, of assignments looked for with ever less room beside the limits.

    Where it ``is_open`` whether any fits, within the limits themselves first.
    """
    free = chain(_with_room(problem, HUGE), time_limit_s=_left(deadline, 4))
    if free.stage_of is None:
        return Closest(None, is_proved=free.proved)
    stage_of = free.stage_of
    if is_open and _over_bytes(problem, stage_of) > 0:
        stage_of = chain(problem, time_limit_s=_left(deadline, 4)).stage_of or stage_of
    return Closest(*_least_room(problem, stage_of, deadline))


def why_none(
    case: Case, problem: Problem, answer: Answer, nearest: Closest, deadline: float
) -> InfeasibleError:
    """The error for a case without a plan: that there is none where that is proved, else what was tried.

    Names the rank that is short in the plan that comes nearest, and what would fit: memory on every
    rank, more stages (each on one more rank like the last), recomputing. Looked for until ``deadline``, so
    what is named fits for sure, and is the smallest that was found.
    """
    what = f"no {case.n_stages}-stage plan of {case.schedule}"
    if nearest.stage_of is None:
        pins = dict(case.source.settings.pin)
        if nearest.is_proved:
            return InfeasibleError(
                f"{what} meets the pins: {pins} leaves a stage empty or turns data backwards; drop a pin"
            )
        meets, or_else = (f"meets the pins {pins}", ", or drop a pin") if pins else ("fits", "")
        return UndecidedError(
            f"{what} that {meets} was found in the time, and none was ruled out; raise time_limit_s{or_else}"
        )
    place, room = _place(problem, nearest.stage_of), _room_words(problem, nearest.over_bytes)
    if not answer.proved:
        return UndecidedError(
            f"{what} that fits was found in the time, and none was ruled out: chains along several orders, "
            f"single moves, and splits by ops and by parameters were tried; {place}; "
            f"raise time_limit_s, or {room}"
        )
    remedies = [room, *_other_remedies(case, deadline)]
    return InfeasibleError(f"{what} fits: {place}; {'; '.join(remedies)}")


def _left(deadline: float, parts: int) -> float:
    return max(_LEAST_S, (deadline - clock_s()) / parts)


def _with_room(problem: Problem, extra: int) -> Problem:
    """The problem with so many more bytes on every rank."""
    stages = (dataclasses.replace(s, limit_bytes=min(HUGE, s.limit_bytes + extra)) for s in problem.stages)
    return dataclasses.replace(problem, stages=tuple(stages))


def _least_room(problem: Problem, stage_of: tuple[int, ...], deadline: float) -> tuple[tuple[int, ...], int]:
    """The assignment that fits with the fewest bytes more on every rank, as far as found, and those bytes."""
    most, best = _over_bytes(problem, stage_of), stage_of
    least = 0
    for _ in range(_STEPS):
        if most - least <= 1 or clock_s() > deadline:
            break
        middle = (least + most) // 2
        found = chain(_with_room(problem, middle), time_limit_s=_left(deadline, 2)).stage_of
        if found is None:
            least = middle
        else:
            most, best = min(middle, _over_bytes(problem, found)), found
    return best, most


def _over_bytes(problem: Problem, stage_of: Sequence[int]) -> int:
    """What the rank that is shortest of memory is over its limit, less than nothing where all have room."""
    return max(_excess(problem, stage_of).values())


def _excess(problem: Problem, stage_of: Sequence[int]) -> dict[int, int]:
    """By rank, the bytes over its limit."""
    loads = problem.loads(stage_of)
    return {
        rank: problem.rank_bytes(rank, [loads[s] for s in own]) - problem.stages[own[0]].limit_bytes
        for rank, own in problem.stages_of.items()
    }


def _place(problem: Problem, stage_of: Sequence[int]) -> str:
    """The rank that is shortest of memory, what it holds, and by how much it is over."""
    excess = _excess(problem, stage_of)
    rank = max(excess, key=lambda r: (excess[r], -r))
    own = problem.stages_of[rank]
    ops = [op for item, s in zip(problem.items, stage_of, strict=True) if s in own for op in item.ops]
    limit = problem.stages[own[0]].limit_bytes
    stages = f"stage {own[0]}" if len(own) == 1 else f"stages {', '.join(map(str, own))}"
    alive = max(problem.stages[s].in_flight for s in own)
    shown = [format_bytes(n) for n in (limit + excess[rank], limit)]
    if shown[0] == shown[1]:
        shown = [f"{n:,} B" for n in (limit + excess[rank], limit)]
    return (
        f"the one that comes closest needs {shown[0]} on rank {rank} ({stages}, {_span(ops)}, {alive} "
        f"microbatch{'es' * (alive > 1)} in flight), limit {shown[1]}"
    )


def _span(ops: Sequence[str]) -> str:
    return ops[0] if len(ops) == 1 else f"{ops[0]} to {ops[-1]}"


def _room_words(problem: Problem, short: int) -> str:
    limits = {s.limit_bytes for s in problem.stages}
    if len(limits) == 1:
        return f"a limit of {format_bytes(limits.pop() + short, at_least=True)} per rank fits"
    return f"{format_bytes(short, at_least=True)} more on every rank is enough"


def _other_remedies(case: Case, deadline: float) -> list[str]:
    out = []
    stages = _enough_stages(case, deadline)
    if stages is not None:
        out.append(f"the smallest n_stages found to fit is {stages}")
    return out + _recomputing(case, deadline)


def _recomputing(case: Case, deadline: float) -> list[str]:
    """That recomputing would do, where it does."""
    if case.source.settings.recompute != "never":
        return []
    again = dataclasses.replace(case.source.settings, recompute="auto")
    changed = dataclasses.replace(case, source=dataclasses.replace(case.source, settings=again))
    return ["recompute='auto' fits"] if _fits(changed.problem(), deadline) else []


def _enough_stages(case: Case, deadline: float) -> int | None:
    """The fewest stages, and ranks for them like the last, that fit: one more at a time, then doubled."""
    n_ranks = case.source.cluster.n_ranks
    per_rank, rest = divmod(case.n_stages, n_ranks)
    if rest:
        return None
    counts = [n_ranks + i for i in range(1, _MORE_STAGES + 1)]
    counts += [2**i * n_ranks for i in range(1, _MORE_STAGES + 1) if 2**i * n_ranks > counts[-1]]
    for n in counts:
        if clock_s() > deadline:
            return None
        try:
            problem = _grown(case, n, n * per_rank).problem()
        except InfeasibleError:
            return None
        if _fits(problem, deadline):
            return n * per_rank
    return None


def _grown(case: Case, n_ranks: int, n_stages: int) -> Case:
    """The case on more ranks, each like the last there is."""
    source, last = case.source, case.source.cluster.n_ranks - 1
    there, more = source.cluster, n_ranks - last - 1
    grown = dataclasses.replace(
        there,
        devices=there.devices + there.devices[-1:] * more,
        hosts=there.hosts + there.hosts[-1:] * more,
        nics=there.nics + there.nics[-1:] * more,
    )
    limits = source.settings.memory_limit
    limits += limits[-1:] * (n_ranks - last - 1)
    settings = dataclasses.replace(source.settings, memory_limit=limits)
    order = (*case.order, *range(last + 1, n_ranks))
    return dataclasses.replace(
        case,
        source=dataclasses.replace(source, cluster=grown, settings=settings),
        n_stages=n_stages,
        order=order,
    )


def _fits(problem: Problem, deadline: float) -> bool:
    return chain(problem, time_limit_s=_left(deadline, 4)).stage_of is not None
