"""Why a plan's cuts are where they are: what moving each by one op would change, what the bottleneck is, and
what more memory would be worth.

Every move is priced like a plan: communication, ties and memory included, then simulated. Showing it is left
to the caller; what the plan itself says is in ``plans``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..costs import CostTable
from ..errors import PlanError
from ..graph import OpGraph
from ..memory import memory_limits
from ..plans import Plan
from ..schedule import placement
from ..simulator import plan_schedule, simulate
from ..units import format_seconds
from .chains import chain
from .definition.problem import HUGE, Problem
from .making.cases import Case
from .making.compose import lay_out
from .making.formulate import formulate
from .making.options import Options, options_of
from .making.source import Source
from .making.tails import tail_words
from .step import fastest
from .stopping import clock_s

__all__ = ["Explanation", "Move", "explain"]


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """The ops beside a cut that would change sides, and the changes in seconds (positive: worse).

    ``cut`` is the stage before the cut. ``bottleneck_s`` is the change of the largest load of a rank per
    microbatch, ``step_s`` that of the simulated step. ``fits`` says whether memory would still do.
    """

    cut: int
    ops: tuple[str, ...]
    source: int
    target: int
    bottleneck_s: float
    step_s: float
    fits: bool

    def __str__(self) -> str:
        what = self.ops[0] if len(self.ops) == 1 else f"{self.ops[0]} and {len(self.ops) - 1} tied to it"
        changes = f"bottleneck {_signed(self.bottleneck_s)}, step {_signed(self.step_s)}"
        return f"{what} to stage {self.target}: {changes if self.fits else 'memory does not suffice'}"


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """The fullest stage, its dearest op, and for each cut the best move either way, where there is one.

    ``memory_prices_s`` is, per rank, the seconds of a step that one more GiB there would save;
    ``recomputed_s``, per stage, those of a microbatch's backward that go into running ops again; ``nic_s``
    those for which a microbatch's messages hold the fullest network interface that ranks share;
    ``tail`` says what runs once on the whole batch.
    """

    bottleneck_stage: int
    bottleneck_op: str
    bottleneck_s: float
    moves: tuple[Move, ...]
    memory_prices_s: tuple[float, ...] = ()
    recomputed_s: tuple[float, ...] = ()
    nic_s: float = 0.0
    tail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        head = (
            f"bottleneck: stage {self.bottleneck_stage}, {format_seconds(self.bottleneck_s)} per microbatch, "
            f"most of it in {self.bottleneck_op}"
        )
        prices = [
            f"one more GiB on rank {rank} would save {format_seconds(price)} a step"
            for rank, price in enumerate(self.memory_prices_s)
            if price > 0
        ]
        again = [
            f"stage {s} runs ops again to fit memory, {format_seconds(seconds)} per microbatch"
            for s, seconds in enumerate(self.recomputed_s)
            if seconds > 0
        ]
        if self.nic_s > self.bottleneck_s:
            head += f"; a network interface that ranks share is held longer, {format_seconds(self.nic_s)}"
        tail = [self.tail] if self.tail else []
        return "\n".join(
            [head, *tail, *(f"cut {m.cut}|{m.cut + 1}: {m}" for m in self.moves), *again, *prices]
        )


def explain(plan: Plan, graph: OpGraph, costs: CostTable, *, time_limit_s: float = 5.0) -> Explanation:
    """What moving each cut of ``plan`` by one op would change, under the settings it was made with.

    Of the ops that may move, the one that leaves the least bottleneck is shown. Moves that pins, groups or
    data flow forbid, and those that empty a stage, are left out. Where memory is limited, the plan is solved
    again with more of it on each rank in turn, within ``time_limit_s`` in all. Raises :class:`PlanError` when
    the plan is of another graph. O(cuts · ops beside them · (ops + edges)).
    """
    if plan.graph_digest != graph.digest:
        raise PlanError(
            f"the plan is of {plan.model} with graph {plan.graph_digest}, not of {graph.model} with graph "
            f"{graph.digest}; capture the model the plan was made for"
        )
    source = Source.of(graph, costs, plan.cluster, Options(**options_of(plan))).cut_into(plan.n_microbatches)
    problem = formulate(source, plan_schedule(plan))
    now = _assignment(plan, problem)
    before, step_s = problem.bottleneck(problem.loads(now)), _step_s(plan, source, problem, now)
    moves = []
    for s in range(plan.n_stages - 1):
        for here, there in ((s, s + 1), (s + 1, s)):
            found = min(_moved(problem, now, here, there), default=None)
            if found is None:
                continue
            after, v = found
            stage_of = _with(now, v, there)
            change = _step_s(plan, source, problem, stage_of) - step_s
            ops = problem.items[v].ops
            moves.append(
                Move(s, ops, here, there, (after % HUGE - before % HUGE) / 1e9, change, after < HUGE)
            )
    priced = problem.loads(now)
    loads = [load.load_ns for load in priced]
    nic_s = max(problem.loads_of(priced)[len(problem.stages_of) :], default=0) / 1e9
    worst = max(range(plan.n_stages), key=loads.__getitem__)
    dearest = max(plan.stages[worst].ops, key=lambda op: costs[op].paced.seconds)
    prices = _memory_prices(plan, source, clock_s() + time_limit_s)
    again = tuple(_recomputed_s(plan, costs, s) for s in range(plan.n_stages))
    words = tail_words(graph, plan.n_microbatches, plan.settings.get("loss_on", ""))
    return Explanation(worst, dearest, loads[worst] / 1e9, tuple(moves), prices, again, nic_s, words)


def _recomputed_s(plan: Plan, costs: CostTable, s: int) -> float:
    """What a stage's backward spends on running forward again."""
    stage = plan.stages[s]
    rows = (stage.ops,) if stage.recompute else stage.recomputed
    again_s = 0.0
    for row in rows:
        forwards = [(costs[op].forward_s, costs[op].host_forward_s) for op in row]
        again_s += max(map(sum, zip(*forwards, strict=True)))  # of device and host, the slower
    return again_s / plan.cluster.devices[stage.rank].speed


def _memory_prices(plan: Plan, source: Source, deadline: float) -> tuple[float, ...]:
    """By rank, what one more GiB takes off the best step; nothing is looked for where no limit binds."""
    limits = [HUGE if limit is None else limit for limit in memory_limits(plan)]
    none = (0.0,) * plan.n_ranks
    if min(limits) >= HUGE:
        return none
    parts = plan.n_ranks + 2
    now = _best_step_s(plan, source, limits, deadline, parts)
    if now is None or (_best_step_s(plan, source, [HUGE] * plan.n_ranks, deadline, parts - 1) or 0.0) >= now:
        return none
    out = []
    for rank in range(plan.n_ranks):
        more = [min(HUGE, limit + (rank == r) * (1 << 30)) for r, limit in enumerate(limits)]
        step_s = _best_step_s(plan, source, more, deadline, plan.n_ranks - rank)
        out.append(max(0.0, now - (now if step_s is None else step_s)))
    return tuple(out)


def _best_step_s(
    plan: Plan, source: Source, limits: Sequence[int], deadline: float, parts: int
) -> float | None:
    """The step of the best plan found under other limits, on the same ranks in the same order."""
    until = clock_s() + max(0.0, deadline - clock_s()) / parts
    devices = tuple(dataclasses.replace(d, memory_bytes=None) for d in source.cluster.devices)
    roomy = dataclasses.replace(
        source,
        cluster=dataclasses.replace(source.cluster, devices=devices),
        limits=tuple(limits),
    )
    slots = placement(plan.schedule, plan.n_ranks, plan.n_stages)
    order = tuple(rank for _, rank in sorted(set(zip(slots, plan.placement, strict=True))))
    case = Case(roomy, plan.schedule, plan.n_stages, plan.n_microbatches, "cost", order, order)
    problem = case.problem()
    answer = chain(problem, time_limit_s=max(0.01, until - clock_s()))
    best = None if answer.stage_of is None else fastest(case, problem, answer, until)
    return None if best is None else best.step_s


def _assignment(plan: Plan, problem: Problem) -> tuple[int, ...]:
    """The stage of each item: that of its ops, the model's output in the last.

    Raises :class:`PlanError` where no stage has one, or one comes before what it takes.
    """
    found: list[int] = []
    for x, item in enumerate(problem.items):
        places = {plan.stages_of[op][0] if op in plan.stages_of else -1 for op in item.ops}
        found.append(min(places, default=plan.n_stages - 1))
        if len(places) > 1 or any(found[before] > found[x] for before in problem.before[x]) or found[x] < 0:
            raise PlanError(
                f"the plan puts {', '.join(item.ops[:3]) or 'the output'} in {_stages_named(places)}, which "
                f"the graph of {plan.model} does not allow: it was changed since it was made; plan again"
            )
    return tuple(found)


def _stages_named(places: Iterable[int]) -> str:
    named = (f"stage {s}" if s >= 0 else "no stage" for s in sorted(places))
    return " and ".join(named) or "the last stage"


def _moved(problem: Problem, now: Sequence[int], here: int, there: int) -> Iterator[tuple[int, int]]:
    """The bottleneck after each move of one item that is allowed, and the item."""
    beside = problem.after if there > here else problem.before
    for v, s in enumerate(now):
        if s != here or not problem.items[v].ops or any(now[u] == here for u in beside[v]):
            continue
        stage_of = _with(now, v, there)
        if problem.is_valid(stage_of):
            yield problem.bottleneck(problem.loads(stage_of)), v


def _with(now: Sequence[int], v: int, there: int) -> tuple[int, ...]:
    return (*now[:v], there, *now[v + 1 :])


def _step_s(plan: Plan, source: Source, problem: Problem, stage_of: Sequence[int]) -> float:
    layout = lay_out(source, problem, stage_of, problem.loads(stage_of))
    changed = dataclasses.replace(plan, stages=layout.stages, boundaries=layout.boundaries, ties=layout.ties)
    return float(simulate(changed).step_s)


def _signed(change: float) -> str:
    return f"{'−' if change < 0 else '+'}{format_seconds(abs(change))}" if change else "unchanged"
