"""Runs a schedule on paper: from times, transfers and a cluster to a timeline.

What a plan says of them is left to ``simulate_plan``, what the timeline tells to ``timeline``, what uneven
microbatches cost to ``jitter``.

Known error: ranks that have a processor each never slow one another down, nor the transfers beside them;
those that share a host's cores are left to ``shared_cores``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import InputError
from ..hardware import Cluster
from ..memory import StageMemory
from ..schedule import Action, Schedule, StageTimes, Transfer, wire_order
from ..schedule.clock import Clock, Edges, Gathering, run
from .jitter import uneven_s
from .shared_cores import is_shared, run_shared
from .timeline import Timeline
from .timeline_data import Event

__all__ = ["simulate_schedule"]


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
    _check_lengths(schedule, times=times, memory=memory, gather_s=gather_s or None)
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
    if not overlap:
        clock = _blocking(schedule, times, transfers, cluster)
    elif cluster is not None and shares:
        own_s = () if any(ties_s) else steps_s
        clock, stepped = run_shared(schedule, times, edges, cluster, alone=alone, optimizer_s=own_s)
    else:
        clock = run(schedule, times, edges, cluster, gathering)
    late_s = uneven_s(schedule, times, edges, cluster, jitter_s)
    tail = _tail(clock, late_s, ties_s, loss_s, steps_s, stepped)
    if start_s:
        clock, tail = _later(clock, start_s), tuple(_postponed(e, start_s) for e in tail)
    return Timeline(
        schedule,
        clock.starts_s,
        clock.ends_s,
        step_s=max([0.0, *(e.end_s for e in tail), *(row[-1] for row in clock.ends_s if row)]),
        sent=clock.sent,
        tail=tail,
        memory=None if memory is None else tuple(memory),
        shared_bytes=tuple(shared_bytes),
        gathered=tuple(clock.gathered),
    )


def _check_lengths(schedule: Schedule, **by_stage: Sequence[object] | None) -> None:
    for what, given in by_stage.items():
        if given is not None and len(given) != schedule.n_stages:
            raise InputError(
                f"{what} has {len(given)} entries for {schedule.n_stages} stages; give one for each"
            )


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


def _later(clock: Clock, seconds: float) -> Clock:
    """The same, begun so much later."""
    starts, ends = ([[t + seconds for t in row] for row in rows] for rows in (clock.starts_s, clock.ends_s))
    sent = [(*row[:4], row[4] + seconds, row[5] + seconds, row[6]) for row in clock.sent]
    gathered = [(rank, stage, a + seconds, b + seconds) for rank, stage, a, b in clock.gathered]
    return Clock(clock.schedule, starts, ends, sent, gathered)


def _postponed(event: Event, seconds: float) -> Event:
    return event._replace(start_s=event.start_s + seconds, end_s=event.end_s + seconds)


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
