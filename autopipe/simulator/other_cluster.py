"""A plan as it stands, put on other ranks: devices of other speeds, other links.

Timing its step there is left to ``simulate_plan``.
"""

from __future__ import annotations

import dataclasses

from ..arguments import brief
from ..errors import InputError, PlanError
from ..hardware import Cluster
from ..plans import Plan, StagePlan, Tie
from ..units import n_of

__all__ = ["on_cluster"]


def on_cluster(plan: Plan, cluster: Cluster) -> Plan:
    """The plan with another cluster's ranks in the place of its own, its stages and ties as long as there.

    Its step, its bounds and its candidates are still those of the cluster that it was made for. Raises
    :class:`PlanError` where the cluster has another number of ranks.
    """
    if not isinstance(cluster, Cluster):
        raise InputError(f"cluster is {brief(cluster)}; it must be a Cluster: Cluster.read reads one")
    if cluster.n_ranks != plan.n_ranks:
        raise PlanError(
            f"the plan is for {n_of(plan.n_ranks, 'rank')}, the cluster has {cluster.n_ranks}; plan again"
        )
    stages = tuple(_at_pace(stage, plan.cluster, cluster) for stage in plan.stages)
    trains = any(stage.backward_s for stage in plan.stages)
    ties = tuple(_over(tie, plan, cluster) if trains else tie for tie in plan.ties)
    return dataclasses.replace(plan, cluster=cluster, stages=stages, ties=ties)


def _at_pace(stage: StagePlan, before: Cluster, after: Cluster) -> StagePlan:
    """The stage, with what it takes at the speed of its rank's device in another cluster."""
    ratio = before.devices[stage.rank].speed / after.devices[stage.rank].speed
    return dataclasses.replace(
        stage,
        forward_s=stage.forward_s * ratio,
        backward_s=stage.backward_s * ratio,
        backward_input_s=stage.backward_input_s * ratio,
        backward_weight_s=stage.backward_weight_s * ratio,
    )


def _over(tie: Tie, plan: Plan, cluster: Cluster) -> Tie:
    """The tie, with what its sum takes over a cluster's links."""
    ranks = {plan.placement[s] for s in tie.stages}
    return dataclasses.replace(tie, seconds=cluster.all_reduce_s(tie.n_bytes, ranks))
