"""From a graph, its costs and a cluster to the plan that simulates fastest among near-optimal chains.

The exact method is left to ``exact``, the definition of a load to ``problem``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..costs import CostTable
from ..errors import InfeasibleError
from ..graph import OpGraph
from ..hardware import Cluster
from ..memory import ADAM
from ..plans import Bounds, Plan
from ..schedule import build, placement
from ..simulator import simulate
from ..units import parse_bytes
from .baselines import Weigh, by_weight, weights_of
from .compose import Source, lay_out
from .formulate import Settings, formulate, largest_cut
from .intervals import best_chain

__all__ = ["solve"]


def solve(
    graph: OpGraph,
    costs: CostTable,
    cluster: Cluster,
    *,
    n_stages: int,
    n_microbatches: int,
    schedule: str = "1f1b",
    balance: str | Weigh = "cost",
    memory_limit: str | float | None = None,
    ties: str = "auto",
    pin: Mapping[str, int] | None = None,
    optimizer_bytes_per_parameter_byte: float = ADAM,
    time_limit_s: float = 10.0,
) -> Plan:
    settings = Settings(
        ties=ties,
        pin=dict(pin or {}),
        memory_limit=() if memory_limit is None else (parse_bytes(memory_limit),),
        optimizer_bytes_per_parameter_byte=optimizer_bytes_per_parameter_byte,
        training=schedule != "forward-only",
    )
    source = Source(graph, costs, cluster, settings)
    placed = placement(schedule, cluster.n_ranks, n_stages)
    alive = build(schedule, cluster.n_ranks, n_stages, n_microbatches, placement=placed).in_flight
    problem = formulate(graph, costs, cluster, placed, alive, n_microbatches, settings)
    if largest_cut(problem) < n_stages:
        raise InfeasibleError(
            f"the graph has {largest_cut(problem)} pieces that can be cut apart, fewer than "
            f"n_stages={n_stages}; use at most {largest_cut(problem)} stages, or open a module"
        )
    order = range(len(problem.items))
    if balance == "cost":
        found = best_chain(problem, order)
        stage_of = found[1] if found else None
    else:
        stage_of = by_weight(problem, weights_of(graph, problem, balance))
    if stage_of is None:
        raise InfeasibleError(f"no {n_stages}-stage plan fits")
    layout = lay_out(source, problem, stage_of)
    bottleneck = problem.bottleneck(problem.loads(stage_of)) / 1e9
    lower = problem.total_ns / 1e9 / cluster.n_ranks
    plan = Plan(
        graph.model,
        graph.digest,
        layout.stages,
        layout.boundaries,
        layout.ties,
        schedule,
        n_microbatches,
        0.0,
        Bounds(bottleneck, lower, 0.0, False),
        cluster,
        (),
        {
            "balance": balance if isinstance(balance, str) else "callable",
            "ties": ties,
            "optimizer_bytes_per_parameter_byte": optimizer_bytes_per_parameter_byte,
            "optimizer_s_per_byte": costs.optimizer_s_per_byte,
        },
    )
    return dataclasses.replace(plan, step_s=simulate(plan).step_s)
