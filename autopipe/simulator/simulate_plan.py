"""The step that a plan predicts: its own times, transfers, ties, optimizer and memory, run on paper.

Timing a schedule is left to ``simulate_schedule``.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from ..arguments import brief, flag, one_of, whole
from ..costs import CostTable
from ..errors import InputError
from ..hardware import Cluster
from ..memory import StageMemory, plan_memory, tied_bytes
from ..plans import Plan
from ..schedule import NAMES, Schedule
from ..units import format_seconds, n_of
from .other_cluster import on_cluster
from .plan_inputs import plan_schedule, plan_transfers, stage_times
from .simulate_schedule import simulate_schedule
from .timeline import Timeline

__all__ = ["check_costs", "in_turn_s", "simulate", "warn_if_changed"]

_logger = logging.getLogger(__name__)

_OTHERWISE = 0.01
"""By so much of its step a plan may differ from what is predicted for it, before that is told."""
_AGREED, _LOSS = 24, 8
"""Bytes that each rank shows the next before a step, and those of the loss."""


def simulate(
    plan: Plan,
    *,
    schedule: str | Schedule | None = None,
    n_microbatches: int | None = None,
    overlap: bool = True,
    costs: CostTable | None = None,
    cluster: Cluster | None = None,
    shards: int = 1,
    most_whole: int | None = None,
) -> Timeline:
    """The step of a plan, or of the plan under another schedule or microbatch count.

    A microbatch stays what it was when the plan's costs were taken, so more microbatches mean a larger
    batch. Optimizer state and time come from the plan's settings (``optimizer_bytes_per_parameter_byte``,
    ``optimizer_s_per_byte``, ``optimizer_s_per_tensor``) where they are there, at the speed of each rank's
    device, and so do ``start_s`` and ``jitter_s``. With a given schedule its own placement counts. Op
    ``costs`` make its memory closer (``memory.plan_memory``). With another ``cluster``, of as many ranks, its
    stages take as long as at the speeds there, its messages and ties as over the links there.

    ``shards``: over how many replicas each stage's weights and optimizer state lie in shards (FSDP). They are
    gathered round a ring of the cluster's links between hosts (within its one), ``most_whole`` stages of a
    rank at a time, all of them for None. Known error: the scattering of gradients hides behind the last
    backward.

    Raises :class:`InputError` where a given schedule is not for as many stages and ranks as the plan, or the
    costs are of other ops, :class:`PlanError` where a cluster has not as many ranks.
    """
    flag("overlap", overlap)
    shards = whole("shards", shards)
    if most_whole is not None:
        most_whole = whole("most_whole", most_whole)
    if costs is not None:
        check_costs(plan, costs)
    if cluster is not None:
        plan = on_cluster(plan, cluster)
    chosen = _chosen(plan, schedule, n_microbatches)
    placed, training = chosen.placement, chosen.has_backward
    memory = [
        dataclasses.replace(m, in_flight=n)
        for m, n in zip(plan_memory(plan, costs), chosen.in_flight, strict=True)
    ]
    return simulate_schedule(
        chosen,
        stage_times(plan),
        plan_transfers(plan),
        plan.cluster,
        start_s=_start_s(plan) + _agreeing_s(plan),
        jitter_s=float(plan.settings.get("jitter_s", 0.0)),
        tie_s=_tie_s(plan, placed) if training else 0.0,
        loss_s=_loss_s(plan, placed[-1]),
        optimizer_s=_optimizer_s(plan, placed) if training else 0.0,
        memory=_sharded(memory, chosen, shards, most_whole),
        shared_bytes=tied_bytes(plan, placed),
        overlap=overlap,
        alone=float(plan.settings.get("alone", 1.0)),
        gather_s=[_gather_s(plan, stage.parameter_bytes, shards) for stage in plan.stages],
        most_whole=most_whole,
    )


def warn_if_changed(plan: Plan, what: str) -> None:
    """Warns where a plan says of its step what is not predicted of it as it stands, as of one edited by hand.

    Its memory, bounds and candidates are then likely of before too.
    """
    step_s = simulate(plan).step_s
    if abs(step_s - plan.step_s) > _OTHERWISE * step_s:
        _logger.warning(
            "%s says that a step takes %s, and as it stands it takes %s: it was changed since it was made, "
            "or made by another release, and its memory, bounds and alternatives may be those of before; "
            "plan again for new ones",
            what,
            format_seconds(plan.step_s),
            format_seconds(step_s),
        )


def _chosen(plan: Plan, schedule: str | Schedule | None, n_microbatches: int | None) -> Schedule:
    """The schedule asked for; one that is given must be for the plan's stages and ranks."""
    if n_microbatches is not None:
        n_microbatches = whole("n_microbatches", n_microbatches)
    if not isinstance(schedule, Schedule):
        name = None if schedule is None else one_of("schedule", schedule, NAMES)
        return plan_schedule(plan, name, n_microbatches)
    if (schedule.n_stages, schedule.n_ranks) != (plan.n_stages, plan.n_ranks):
        raise InputError(
            f"schedule {schedule.name!r} has {n_of(schedule.n_stages, 'stage')} on "
            f"{n_of(schedule.n_ranks, 'rank')}, the "
            f"plan {plan.n_stages} on {plan.n_ranks}; plan again with n_stages={schedule.n_stages}"
        )
    return schedule


def _optimizer_s(plan: Plan, placed: Sequence[int]) -> list[float]:
    """Per rank, seconds of the optimizer's step."""
    per_byte, per_tensor = (float(plan.settings.get(f"optimizer_s_per_{x}", 0.0)) for x in ("byte", "tensor"))
    on_host = plan.settings.get("offload") in ("optimizer", "all")
    out = [0.0] * plan.n_ranks
    for stage in plan.stages:
        rank = placed[stage.index]
        stepped_s = per_byte * stage.gradient_bytes + per_tensor * stage.n_trained
        out[rank] += stepped_s / (1.0 if on_host else plan.cluster.devices[rank].speed)
    return out


def _tie_s(plan: Plan, placed: Sequence[int]) -> list[float]:
    """Per rank, seconds of the all-reduce of the gradients that it shares with other ranks."""
    out = [0.0] * plan.n_ranks
    for tie in plan.ties:
        holders = {placed[s] for s in tie.stages}
        for rank in holders if len(holders) > 1 else ():
            out[rank] += tie.seconds
    return out


def check_costs(plan: Plan, costs: CostTable) -> None:
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


def in_turn_s(plan: Plan, schedule: Schedule | None = None) -> float:
    """Seconds of a step whose actions one process runs, one after another with the host to itself.

    Of the plan's schedule, or of another for its stages.
    """
    times, chosen = stage_times(plan), schedule or plan_schedule(plan)
    work_s = sum(times[a.stage].seconds(a.kind) for row in chosen.actions for a in row)
    return _start_s(plan) + work_s * (float(plan.settings.get("alone", 1.0)) if plan.cluster.cores else 1.0)


def _start_s(plan: Plan) -> float:
    """Seconds before a rank's first action; what it does after its last counts here too."""
    return float(plan.settings.get("start_s", 0.0)) + max(d.step_s for d in plan.cluster.devices)


def _agreeing_s(plan: Plan) -> float:
    """Seconds in which ranks agree on a step: each hears the one before it, and is heard by the next."""
    n, cluster = plan.n_ranks, plan.cluster
    ways = [cluster.link(r, (r + 1) % n) for r in range(n)] if n > 1 else []
    return max((way.seconds(_AGREED) + 2 * way.working_s(_AGREED) for way in ways), default=0.0)


def _loss_s(plan: Plan, source: int) -> list[float]:
    """Per rank, seconds from the source's having the loss to its being there."""
    ways = [plan.cluster.link(source, rank) for rank in range(plan.n_ranks)]
    return [way.seconds(_LOSS) + way.working_s(_LOSS) for way in ways]
