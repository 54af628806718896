"""Runs a schedule on paper: from times, transfers and a cluster to a timeline.

What the timeline tells is left to ``timeline``, what uneven microbatches cost to ``jitter``.

Known error: ranks that have a processor each never slow one another down, nor the transfers beside them;
those that share a host's cores are left to ``shared_cores``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from ..arguments import brief, flag, one_of, whole
from ..costs import CostTable
from ..errors import InputError
from ..hardware import Cluster
from ..memory import StageMemory, optimizer_ratio, plan_memory, tied_bytes
from ..plans import Plan
from ..schedule import NAMES, Action, Schedule, StageTimes, Transfer, wire_order
from ..schedule.clock import Clock, Edges, Gathering, run
from .jitter import uneven_s
from .plan_inputs import plan_schedule, plan_transfers, stage_times
from .shared_cores import is_shared, run_shared
from .timeline import Timeline
from .timeline_data import Event

__all__ = ["in_turn_s", "simulate", "simulate_schedule"]

_AGREED, _LOSS = 24, 8
"""Bytes that each rank shows the next before a step, and those of the loss."""


def simulate_schedule(
    schedule: Schedule,
    times: Sequence[StageTimes],
    transfers: Iterable[Transfer] | None = None,
    cluster: Cluster | None = None,
    *,
    start_s: float = 0.0,
    jitter_s: float = 0.0,
    tie_s: float | Sequence[float] = 0.0,
    loss_s: Sequence[float] = (),
    optimizer_s: float | Sequence[float] = 0.0,
    memory: Sequence[StageMemory] | None = None,
    shared_bytes: Sequence[int] = (),
    overlap: bool = True,
    alone: float = 1.0,
    gather_s: Sequence[float] = (),
    most_whole: int | None = None,
) -> Timeline:
    """The step as the schedule's ranks would run it.

    Each rank runs its actions in order, each as soon as its inputs have arrived. Messages leave when the
    action that makes them ends; those from one rank to another share a link, first come first served:
    each holds it for bytes / bandwidth and arrives a latency later. Between hosts it also holds the network
    interfaces of both ends, where ranks share them (``Cluster.nics``).

    Parameters
    ----------
    times: per stage, seconds per microbatch.
    transfers: what crosses between stages; for None, each stage waits for the one before, for free.
    cluster: the links; without one, transfers are free.
    start_s: seconds before any rank's first action, in which each takes in the batch.
    jitter_s: how unlike the times of microbatches are (``CostTable.jitter_s``); what that costs (``jitter``)
        follows the last action.
    tie_s: seconds of the all-reduce of tied gradients, for all ranks or per rank. The ranks that have one
        start it together after their last action.
    loss_s: per rank, seconds until it has the loss once the last stage's rank is done, whose own are 0.
    optimizer_s: seconds of the optimizer step, for all ranks or per rank.
    memory: per stage, its bytes; without it the timeline has no memory.
    shared_bytes: per rank, tied bytes its stages count more than once (``memory.tied_bytes``).
    overlap: False where a transfer occupies both its ranks, which then compute nothing (blocking calls).
    alone: where ranks share a host's ``cores``, an action's seconds with no other rank at work, over
        ``times``, which are with every core busy.
    gather_s: per stage, seconds to gather its weights where replicas hold shards of them, beside other work;
        an action begins once its stage is whole.
    most_whole: how many of a rank's stages may be whole at a time; all of them for None.

    Complexity: O(actions + messages). Raises :class:`InputError` where ``times`` or ``memory`` do not fit.
    """
    for given, what in ((times, "times"), (memory, "memory"), (gather_s or None, "gather_s")):
        if given is not None and len(given) != schedule.n_stages:
            raise InputError(
                f"{what} has {len(given)} entries for {schedule.n_stages} stages; give one for each"
            )
    gathering = Gathering(schedule, gather_s, most_whole) if any(gather_s) else None
    ties_s, steps_s = _per_rank(tie_s, schedule), _per_rank(optimizer_s, schedule)
    shares = cluster is not None and is_shared(cluster, schedule.n_ranks, alone)
    if gathering is not None and (shares or not overlap):
        raise InputError(
            "gathers are timed on ranks with a processor each and transfers beside their work; leave out "
            "shards for a cluster of shared cores and for overlap=False"
        )
    transfers = None if transfers is None else tuple(transfers)
    edges, stepped = Edges.of(schedule, transfers), tuple[Event, ...]()
    if overlap and cluster is not None and shares:
        own_s = () if any(ties_s) else steps_s
        clock, stepped = run_shared(schedule, times, edges, cluster, alone=alone, optimizer_s=own_s)
    elif overlap:
        clock = run(schedule, times, edges, cluster, gathering)
    else:
        clock = _blocking(schedule, times, transfers, cluster)
    late_s = uneven_s(schedule, times, edges, cluster, jitter_s)
    tail = _tail(clock, late_s, ties_s, loss_s, steps_s, stepped)
    if start_s:
        clock = _later(clock, start_s)
        tail = tuple(_postponed(e, start_s) for e in tail)
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
        gathered=tuple(clock.gathered),
    )


def simulate(
    plan: Plan,
    *,
    schedule: str | Schedule | None = None,
    n_microbatches: int | None = None,
    overlap: bool = True,
    costs: CostTable | None = None,
    shards: int = 1,
    most_whole: int | None = None,
) -> Timeline:
    """The step of a plan, or of the plan under another schedule or microbatch count.

    A microbatch stays what it was when the plan's costs were taken, so more microbatches mean a larger
    batch. Optimizer state and time come from the plan's settings (``optimizer_bytes_per_parameter_byte``,
    ``optimizer_s_per_byte``, ``optimizer_s_per_tensor``) where they are there, at the speed of each rank's
    device, and so do ``start_s`` and ``jitter_s``. With a given schedule its own placement counts. Op
    ``costs`` make its memory closer (``memory.plan_memory``).

    ``shards``: over how many replicas each stage's weights and optimizer state lie in shards (FSDP). They are
    gathered round a ring of the cluster's links between hosts (within its one), ``most_whole`` stages of a
    rank at a time, all of them for None. Known error: the scattering of gradients hides behind the last
    backward.

    Raises :class:`InputError` where a given schedule is not for as many stages and ranks as the plan, or the
    costs are of other ops.
    """
    if n_microbatches is not None:
        n_microbatches = whole("n_microbatches", n_microbatches)
    flag("overlap", overlap)
    shards = whole("shards", shards)
    if most_whole is not None:
        most_whole = whole("most_whole", most_whole)
    if schedule is not None and not isinstance(schedule, Schedule):
        one_of("schedule", schedule, NAMES)
    if costs is not None:
        _check_costs(plan, costs)
    if not isinstance(schedule, Schedule):
        schedule = plan_schedule(plan, schedule, n_microbatches)
    elif (schedule.n_stages, schedule.n_ranks) != (plan.n_stages, plan.n_ranks):
        raise InputError(
            f"schedule {schedule.name!r} has {schedule.n_stages} stages on {schedule.n_ranks} ranks, the "
            f"plan {plan.n_stages} on {plan.n_ranks}; plan again with n_stages={schedule.n_stages}"
        )
    placed, training = schedule.placement, schedule.has_backward
    tie_s, optimizer_s = [0.0] * plan.n_ranks, [0.0] * plan.n_ranks
    per_byte, per_tensor = (float(plan.settings.get(f"optimizer_s_per_{x}", 0.0)) for x in ("byte", "tensor"))
    on_host = plan.settings.get("offload") in ("optimizer", "all")
    for stage in plan.stages:
        rank = placed[stage.index]
        stepped_s = per_byte * stage.gradient_bytes + per_tensor * stage.n_trained
        optimizer_s[rank] += stepped_s / (1.0 if on_host else plan.cluster.devices[rank].speed)
    for tie in plan.ties:
        holders = {placed[s] for s in tie.stages}
        for rank in holders if len(holders) > 1 else ():
            tie_s[rank] += tie.seconds
    return simulate_schedule(
        schedule,
        stage_times(plan),
        plan_transfers(plan),
        plan.cluster,
        start_s=_start_s(plan) + _agreeing_s(plan),
        jitter_s=float(plan.settings.get("jitter_s", 0.0)),
        tie_s=tie_s if training else 0.0,
        loss_s=_loss_s(plan, placed[-1]),
        optimizer_s=optimizer_s if training else 0.0,
        memory=_sharded(
            [
                dataclasses.replace(m, in_flight=n)
                for m, n in zip(plan_memory(plan, costs), schedule.in_flight, strict=True)
            ],
            schedule,
            shards,
            most_whole,
        ),
        shared_bytes=tied_bytes(plan, optimizer_ratio(plan), placed),
        overlap=overlap,
        alone=float(plan.settings.get("alone", 1.0)),
        gather_s=[_gather_s(plan, stage.parameter_bytes, shards) for stage in plan.stages],
        most_whole=most_whole,
    )


def _check_costs(plan: Plan, costs: CostTable) -> None:
    """Raise :class:`InputError` for costs that are not those of a plan's ops and microbatches."""
    if not isinstance(costs, CostTable):
        raise InputError(f"costs is {brief(costs)}; it must be a CostTable")
    asked = "give the table that the plan was made with"
    made_with = plan.settings.get("costs_of", "")
    if costs.ops and made_with and costs.ops != made_with:
        raise InputError(
            f"the cost table is of other ops ({costs.ops}) than the plan's ({made_with}), though they may be "
            f"called the same: of another model or size of it; {asked}"
        )
    sizes = {name: n for name, n in plan.settings.get("dims", {}).items() if costs.dims.get(name, n) != n}
    if sizes:
        raise InputError(
            f"the cost table is of a microbatch of {dict(costs.dims)}, and the plan's have {sizes}; {asked}"
        )
    for stage in plan.stages:
        if stage.forward_s > 0 and not any(op in costs.costs for op in stage.ops):
            raise InputError(
                f"the cost table has none of the {len(stage.ops)} ops of the plan's stage {stage.index} "
                f"({', '.join(stage.ops[:3])}); {asked}"
            )


def _gather_s(plan: Plan, n_bytes: int, shards: int) -> float:
    """Seconds to gather so many bytes: n − 1 pieces of 1/n round a ring."""
    cluster = plan.cluster
    link = cluster.remote if len(cluster.host_sizes) > 1 else cluster.local
    return (shards - 1) * link.seconds(n_bytes / shards)


def _sharded(
    memory: Sequence[StageMemory], schedule: Schedule, shards: int, most: int | None
) -> list[StageMemory]:
    """The stages' bytes where weights and optimizer state are in shards, a rank's largest also whole."""
    if shards == 1:
        return list(memory)
    out = [
        dataclasses.replace(
            m, weight_bytes=m.weight_bytes // shards, optimizer_bytes=m.optimizer_bytes // shards
        )
        for m in memory
    ]
    for rank in range(schedule.n_ranks):
        largest = sorted(schedule.stages_of(rank), key=lambda s: -memory[s].weight_bytes)
        for s in largest[:most]:
            out[s] = dataclasses.replace(out[s], weight_bytes=out[s].weight_bytes + memory[s].weight_bytes)
    return out


def in_turn_s(plan: Plan) -> float:
    """Seconds of a step whose actions one process runs, one after another with the host to itself."""
    times = stage_times(plan)
    work_s = sum(times[a.stage].seconds(a.kind) for row in plan_schedule(plan).actions for a in row)
    return _start_s(plan) + work_s * (float(plan.settings.get("alone", 1.0)) if plan.cluster.cores else 1.0)


def _start_s(plan: Plan) -> float:
    """Seconds before a rank's first action."""
    return float(plan.settings.get("start_s", 0.0))


def _agreeing_s(plan: Plan) -> float:
    """Seconds in which ranks agree on a step: each hears the one before it, and is heard by the next."""
    n, cluster = plan.n_ranks, plan.cluster
    ways = [cluster.link(r, (r + 1) % n) for r in range(n)] if n > 1 else []
    return max((way.seconds(_AGREED) + 2 * way.working_s(_AGREED) for way in ways), default=0.0)


def _loss_s(plan: Plan, source: int) -> list[float]:
    """Per rank, seconds from the source's having the loss to its being there."""
    ways = [plan.cluster.link(source, rank) for rank in range(plan.n_ranks)]
    return [way.seconds(_LOSS) + way.working_s(_LOSS) for way in ways]


def _later(clock: Clock, seconds: float) -> Clock:
    """The same, begun so much later."""
    starts, ends = ([[t + seconds for t in row] for row in rows] for rows in (clock.starts_s, clock.ends_s))
    sent = [(*what, left + seconds, came + seconds, n) for *what, left, came, n in clock.sent]
    gathered = [(rank, stage, a + seconds, b + seconds) for rank, stage, a, b in clock.gathered]
    return Clock(clock.schedule, starts, ends, sent, gathered)  # type: ignore[arg-type]


def _postponed(event: Event, seconds: float) -> Event:
    return event._replace(start_s=event.start_s + seconds, end_s=event.end_s + seconds)


def _per_rank(value: float | Sequence[float], schedule: Schedule) -> Sequence[float]:
    return (value,) * schedule.n_ranks if isinstance(value, (int, float)) else value


def _tail(
    clock: Clock,
    late_s: float,
    tie_s: Sequence[float],
    loss_s: Sequence[float],
    optimizer_s: Sequence[float],
    stepped: Sequence[Event] = (),
) -> tuple[Event, ...]:
    """What follows the last action: waits for uneven microbatches, tied gradients, the loss; the optimizer.

    ``stepped``: the optimizers' steps where they are timed already, without what comes before them here.
    """
    last = [row[-1] if row else 0.0 for row in clock.ends_s]
    free = [t + late_s for t in last]
    events = [Event(r, "uneven", *span) for r, span in enumerate(zip(last, free, strict=True)) if late_s]
    together = max((t for t, s in zip(free, tie_s, strict=True) if s), default=0.0)
    for rank, seconds in enumerate(tie_s):
        if seconds:
            free[rank] = together + seconds
            events.append(Event(rank, "ties", together, free[rank]))
    made_s = free[clock.schedule.placement[-1]]
    for rank, seconds in enumerate(loss_s):
        if seconds and made_s + seconds > free[rank]:
            events.append(Event(rank, "loss", free[rank], made_s + seconds))
            free[rank] = made_s + seconds
    if stepped:
        waited = [t - end for t, end in zip(free, last, strict=True)]
        return (*events, *(_postponed(e, waited[e.rank]) for e in stepped))
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
    wire_free = [0.0] * (2 * schedule.n_ranks)
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
        held = cluster.wires(here, there) if cluster and n_bytes else ()
        start = max([free[here], free[there], *(wire_free[w] for w in held)])
        end = start + (cluster.link(here, there).seconds(n_bytes) if cluster else 0)
        free[here] = free[there] = end
        for w in held:
            wire_free[w] = end
        sent.append((event.source, event.destination, back, event.microbatch, start, end, n_bytes))
    return Clock(schedule, starts, ends, sent)
