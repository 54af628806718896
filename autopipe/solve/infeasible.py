"""Why no plan fits: which constraint, where, by how much, and the smallest change that would do.

Finding plans is left to ``search``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..errors import InfeasibleError, UndecidedError
from ..units import format_bytes
from .chains import chain
from .definition.answer import Answer
from .definition.problem import HUGE, Problem
from .making.cases import Case
from .making.formulate import largest_cut
from .proof.shortage import Shortage
from .stopping import clock_s

__all__ = ["Closest", "closest", "no_room", "told_by", "why_none"]

_STEPS = 14
"""Halvings of the memory looked for: within a ten thousandth of the fullest rank's."""

_LEAST_S = 0.02
"""What one look is given at least."""

_TELLING_S = 0.3
"""What is short without any search is told this soon, with what was found to fit by then."""

_MORE_STAGES = 8
"""So many more stages than asked for are looked at, and as many doublings."""


def no_room(case: Case, problem: Problem, short: Shortage, deadline: float | None) -> InfeasibleError:
    """The error where what must be held is too much for all ranks together, with the arithmetic.

    More stages are told of where the graph can be cut into as many. Whether recomputing would do is looked
    for until the deadline, if there is one.
    """
    static, room, n = short.static_bytes, short.room_bytes, case.source.cluster.n_ranks
    needed, more, again = static, "and that is before any activation", ""
    if static <= room:
        needed = short.least_bytes
        more = f"and what microbatches in flight keep is {format_bytes(short.beside_bytes)} at least"
        if case.source.settings.recompute == "never":
            found = () if deadline is None else _recomputing(case, told_by(deadline))
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


def told_by(deadline: float) -> float:
    """Until when is looked for what would fit, where something is short without any search."""
    return min(deadline, clock_s() + _TELLING_S)


@dataclasses.dataclass(frozen=True, slots=True)
class Closest:
    """The assignment found to be least over its limits, and the bytes it is over: none where it fits.

    Without one, whether it ``is_proved`` that there is none however much memory ranks have.
    """

    stage_of: tuple[int, ...] | None
    over_bytes: int = 0
    is_proved: bool = False


def closest(problem: Problem, deadline: float, *, is_open: bool, least_bytes: int = 0) -> Closest:
    """What comes closest to fitting, of assignments looked for with ever less room beside the limits.

    Where it ``is_open`` whether any fits, within the limits themselves first; else with ``least_bytes`` more,
    without which nothing fits.
    """
    free = chain(_with_room(problem, HUGE), time_limit_s=_left(deadline, 4))
    if free.stage_of is None:
        return Closest(None, is_proved=free.proved)
    stage_of = free.stage_of
    if is_open and _over_bytes(problem, stage_of) > 0:
        stage_of = chain(problem, time_limit_s=_left(deadline, 4)).stage_of or stage_of
    return Closest(*_least_room(problem, stage_of, least_bytes, deadline))


def why_none(
    case: Case,
    problem: Problem,
    answer: Answer,
    nearest: Closest,
    deadline: float,
    short: Shortage | None = None,
) -> InfeasibleError:
    """The error for a case without a plan: that there is none where that is proved, else what was tried.

    Names what is ``short`` without any search, the rank that is short in the plan that comes nearest, and
    what would fit: memory on every rank, more stages (each on one more rank like the last), recomputing.
    Looked for until ``deadline``, so what is named fits for sure, and is the smallest that was found.
    """
    what = f"no {case.n_stages}-stage plan of {case.schedule}"
    lacking = "" if short is None else _lacking(case, problem, short)
    finer = short is None or short.what != "least" or short.room_bytes > 0  # nothing runs in no bytes
    if nearest.stage_of is None and lacking and not nearest.is_proved:
        return InfeasibleError(f"{what} fits: {lacking}", finer_may_help=finer)
    if nearest.stage_of is None:
        pins = case.source.settings.pin
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
    reasons = [lacking, place] if lacking else [place]
    return InfeasibleError(f"{what} fits: {'; '.join([*reasons, *remedies])}", finer_may_help=finer)


def _lacking(case: Case, problem: Problem, short: Shortage) -> str:
    """What some stages hold at least, and the room there is for it."""
    pins = f" with the pins {case.source.settings.pin}" if case.source.settings.pin else ""
    there = f"stages {short.first} to {short.last}"
    if short.first == short.last:
        there = f"stage {short.first} (rank {problem.stages[short.first].rank})"
    if short.what in ("one", "least"):
        ops = _span(problem.items[short.item].ops) or "what the model returns"
        which = "where it lacks least" if short.what == "one" else "and no op needs less there"
        needs = f"{ops} alone needs {format_bytes(short.least_bytes)} in {there}, {which}"
    elif short.what == "some":
        needs = f"what must be in {there}{pins} needs {format_bytes(short.least_bytes)} at least"
    else:
        needs = f"limits of these proportions must sum up to {format_bytes(short.least_bytes)} at least{pins}"
    return (
        f"{needs} ({format_bytes(short.static_bytes)} of parameters, gradients and optimizer state, "
        f"{format_bytes(short.beside_bytes)} beside), and there is room for {format_bytes(short.room_bytes)}"
    )


def _left(deadline: float, parts: int) -> float:
    return max(_LEAST_S, (deadline - clock_s()) / parts)


def _with_room(problem: Problem, extra: int) -> Problem:
    """The problem with so many more bytes on every rank."""
    stages = (dataclasses.replace(s, limit_bytes=min(HUGE, s.limit_bytes + extra)) for s in problem.stages)
    return dataclasses.replace(problem, stages=tuple(stages))


def _least_room(
    problem: Problem, stage_of: tuple[int, ...], least: int, deadline: float
) -> tuple[tuple[int, ...], int]:
    """The assignment that fits with the fewest bytes more on every rank, as far as found, and those bytes.

    They are known to be ``least`` at least, which are tried first.
    """
    most, best = _over_bytes(problem, stage_of), stage_of
    least = max(0, least - 1)
    for step in range(_STEPS):
        if most - least <= 1 or clock_s() > deadline:
            break
        middle = least + 1 if least and not step else (least + most) // 2
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
    return " to ".join(dict.fromkeys((*ops[:1], *ops[-1:])))


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
    if case.source.settings.recompute != "never" or clock_s() > deadline:
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
    limits = source.limits + source.limits[-1:] * more
    order = (*case.order, *range(last + 1, n_ranks))
    return dataclasses.replace(
        case,
        source=dataclasses.replace(source, cluster=grown, limits=limits),
        n_stages=n_stages,
        order=order,
    )


def _fits(problem: Problem, deadline: float) -> bool:
    return chain(problem, time_limit_s=_left(deadline, 4)).stage_of is not None
