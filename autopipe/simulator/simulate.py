"""Runs a schedule on paper: from times, transfers and a cluster to a timeline.

What the timeline tells is left to ``timeline``.

Known error: a rank's actions never slow one another down or the transfers beside them, and host overhead is
in the times or nowhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from ..errors import InputError
from ..hardware import Cluster
from ..memory import ADAM, StageMemory, rank_memory, stage_memory, tied_bytes
from ..plans import Plan
from ..schedule import Action, Schedule, StageTimes, Transfer, build, wire_order
from ..schedule.clock import Clock, Edges, run
from .timeline import Event, Timeline

__all__ = ["plan_memory", "plan_schedule", "plan_transfers", "simulate", "simulate_schedule", "stage_times"]


def simulate_schedule(
    schedule: Schedule,
    times: Sequence[StageTimes],
    transfers: Iterable[Transfer] | None = None,
    cluster: Cluster | None = None,
    *,
    tie_s: float | Sequence[float] = 0.0,
    optimizer_s: float | Sequence[float] = 0.0,
    memory: Sequence[StageMemory] | None = None,
    shared_bytes: Sequence[int] = (),
    overlap: bool = True,
) -> Timeline:
    """The step as the schedule's ranks would run it.

    Each rank runs its actions in order, each as soon as its inputs have arrived. Messages leave when the
    action that makes them ends; those from one rank to another share a link, first come first served:
    each holds it for bytes / bandwidth and arrives a latency later.

    Parameters
    ----------
    times: per stage, seconds per microbatch.
    transfers: what crosses between stages; for None, each stage waits for the one before, for free.
    cluster: the links; without one, transfers are free.
    tie_s: seconds of the all-reduce of tied gradients, for all ranks or per rank. The ranks that have one
        start it together after their last action.
    optimizer_s: seconds of the optimizer step, for all ranks or per rank.
    memory: per stage, its bytes; without it the timeline has no memory.
    shared_bytes: per rank, tied bytes its stages count more than once (``memory.tied_bytes``).
    overlap: False where a transfer occupies both its ranks, which then compute nothing (blocking calls).

    Complexity: O(actions + messages). Raises :class:`InputError` where ``times`` or ``memory`` do not fit.
    """
    for given, what in ((times, "times"), (memory, "memory")):
        if given is not None and len(given) != schedule.n_stages:
            raise InputError(f"{what} has {len(given)} entries for {schedule.n_stages} stages")
    if overlap:
        clock = run(schedule, times, Edges.of(schedule, transfers), cluster)
    else:
        clock = _blocking(schedule, times, None if transfers is None else tuple(transfers), cluster)
    tail = _tail(clock, _per_rank(tie_s, schedule), _per_rank(optimizer_s, schedule))
    last = max((e.end_s for e in tail), default=0.0)
    return Timeline(
        schedule,
        clock.starts_s,
        clock.ends_s,
        step_s=max(last, max((row[-1] for row in clock.ends_s if row), default=0.0)),
        sent=clock.sent,
        tail=tail,
        memory=tuple(memory) if memory is not None else None,
        shared_bytes=tuple(shared_bytes),
    )


def simulate(
    plan: Plan,
    *,
    schedule: str | Schedule | None = None,
    n_microbatches: int | None = None,
    overlap: bool = True,
) -> Timeline:
    """The step of a plan, or of the plan under another schedule or microbatch count.

    A microbatch stays what it was when the plan's costs were taken, so more microbatches mean a larger
    batch. Optimizer state and time come from the plan's settings (``optimizer_bytes_per_parameter_byte``,
    ``optimizer_s_per_byte``) where they are there.
    """
    if not isinstance(schedule, Schedule):
        schedule = plan_schedule(plan, schedule, n_microbatches)
    tie_s, trainable = [0.0] * plan.n_ranks, [0] * plan.n_ranks
    for stage in plan.stages:
        trainable[stage.rank] += stage.gradient_bytes
    for tie in plan.ties:
        holders = {plan.placement[s] for s in tie.stages}
        for rank in holders if len(holders) > 1 else ():
            tie_s[rank] += tie.seconds
    per_byte = float(plan.settings.get("optimizer_s_per_byte", 0.0)) if schedule.has_backward else 0.0
    return simulate_schedule(
        schedule,
        stage_times(plan),
        plan_transfers(plan),
        plan.cluster,
        tie_s=tie_s if schedule.has_backward else 0.0,
        optimizer_s=[per_byte * b for b in trainable],
        memory=plan_memory(plan, schedule.in_flight),
        shared_bytes=tied_bytes(plan, _optimizer_ratio(plan)),
        overlap=overlap,
    )


def plan_schedule(plan: Plan, name: str | None = None, n_microbatches: int | None = None) -> Schedule:
    """The schedule of a plan, or another for its stages where they are placed.

    A cost-aware one is made from the plan's times, transfers and links, within the memory limit of its
    settings or, without one, of its devices; from equal times where the plan has none.
    """
    static = rank_memory(_nothing(plan), plan_memory(plan), tied_bytes(plan, _optimizer_ratio(plan)))
    limit = plan.settings.get("memory_limit")
    budget = []
    for rank, device in enumerate(plan.cluster.devices):
        own = [s for s in plan.stages if s.rank == rank]
        allowed = limit if isinstance(limit, (int, float)) else device.memory_bytes
        room = math.inf if allowed is None else allowed - static[rank].total_bytes
        budget.append(room - max((s.workspace_bytes for s in own), default=0))
    return build(
        name or plan.schedule,
        plan.n_ranks,
        plan.n_stages,
        n_microbatches or plan.n_microbatches,
        placement=plan.placement,
        times=stage_times(plan) if all(s.forward_s for s in plan.stages) else None,
        transfers=plan_transfers(plan),
        cluster=plan.cluster,
        saved_bytes=[s.saved_bytes for s in plan.stages],
        budget_bytes=budget,
    )


def plan_memory(plan: Plan, in_flight: Sequence[int] = ()) -> tuple[StageMemory, ...]:
    """The bytes of a plan's stages, as its optimizer setting has them."""
    return tuple(
        stage_memory(
            parameter_bytes=s.parameter_bytes,
            gradient_bytes=s.gradient_bytes,
            saved_bytes=s.saved_bytes,
            workspace_bytes=s.workspace_bytes,
            in_flight=in_flight[s.index] if in_flight else s.in_flight,
            optimizer_bytes_per_parameter_byte=_optimizer_ratio(plan),
        )
        for s in plan.stages
    )


def _optimizer_ratio(plan: Plan) -> float:
    return float(plan.settings.get("optimizer_bytes_per_parameter_byte", ADAM))


def _nothing(plan: Plan) -> Schedule:
    return Schedule("", plan.placement, 1, ((),) * plan.n_ranks)


def stage_times(plan: Plan) -> tuple[StageTimes, ...]:
    """The seconds of a plan's stages."""
    names = [f.name for f in dataclasses.fields(StageTimes)]
    return tuple(StageTimes(*(getattr(s, name) for name in names)) for s in plan.stages)


def plan_transfers(plan: Plan) -> tuple[Transfer, ...] | None:
    """What crosses between a plan's stages, one transfer per value and consumer; None where none is known."""
    if not plan.boundaries:
        return None
    return tuple(
        Transfer(b.source, d, b.n_bytes, b.differentiable, b.value)
        for b in plan.boundaries
        for d in b.destinations
    )


def _per_rank(value: float | Sequence[float], schedule: Schedule) -> Sequence[float]:
    return (value,) * schedule.n_ranks if isinstance(value, (int, float)) else value


def _tail(clock: Clock, tie_s: Sequence[float], optimizer_s: Sequence[float]) -> tuple[Event, ...]:
    """What follows the last action: the tied all-reduce, then the optimizer."""
    free = [row[-1] if row else 0.0 for row in clock.ends_s]
    together = max((t for t, s in zip(free, tie_s, strict=True) if s), default=0.0)
    events = []
    for rank, seconds in enumerate(tie_s):
        if seconds:
            free[rank] = together + seconds
            events.append(Event(rank, "ties", together, free[rank]))
    for rank, seconds in enumerate(optimizer_s):
        if seconds:
            events.append(Event(rank, "optimizer", free[rank], free[rank] + seconds))
    return tuple(events)


def _blocking(
    schedule: Schedule,
    times: Sequence[StageTimes],
    transfers: tuple[Transfer, ...] | None,
    cluster: Cluster | None,
) -> Clock:
    """The clock where every send and receive blocks: along the wire's global line, whose order ranks keep."""
    edges = Edges.of(schedule, transfers)
    free = [0.0] * schedule.n_ranks
    starts: list[list[float]] = [[] for _ in free]
    ends: list[list[float]] = [[] for _ in free]
    sent = []
    for event in wire_order(schedule, transfers, times=times).line:
        if isinstance(event, Action):
            rank = schedule.placement[event.stage]
            starts[rank].append(free[rank])
            free[rank] += times[event.stage].seconds(event.kind)
            ends[rank].append(free[rank])
            continue
        here, there = schedule.placement[event.source], schedule.placement[event.destination]
        back = event.kind == "B"
        n_bytes = (edges.backward if back else edges.forward)[event.source][event.destination]
        start = max(free[here], free[there])
        free[here] = free[there] = end = start + (
            cluster.link(here, there).seconds(n_bytes) if cluster else 0
        )
        sent.append((event.source, event.destination, back, event.microbatch, start, end, n_bytes))
    return Clock(schedule, starts, ends, sent)
