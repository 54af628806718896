"""A plan that cuts a captured graph into equal runs of program order, without costs or a solver.

Capturing is measured with it alone; good plans are ``autopipe.solve``'s.
"""

from __future__ import annotations

import itertools

from autopipe.graph import OpGraph
from autopipe.hardware import Cluster
from autopipe.plans import Bounds, Plan, StagePlan

__all__ = ["uniform_plan"]


def uniform_plan(graph: OpGraph, n_stages: int, cluster: Cluster) -> Plan:
    """``graph`` in ``n_stages`` runs of nearly equal parameter counts, or as many as it has cuts for."""
    names = [op.name for op in graph.compute]
    position = {name: i for i, name in enumerate(names)}
    weights = [1 + sum(graph.parameter[p].numel for p in op.parameters) for op in graph.compute]
    total = list(itertools.accumulate(weights, initial=0))
    is_cut = [True] * (len(names) + 1)
    for group in graph.groups:
        places = sorted(position[n] for n in group if n in position)
        if places:
            is_cut[places[0] + 1 : places[-1] + 1] = [False] * (places[-1] - places[0])
    allowed = [i for i in range(1, len(names)) if is_cut[i]]
    bounds = [0]
    for stage in range(1, n_stages):
        target = stage * total[-1] / n_stages
        later = [i for i in allowed if i > bounds[-1]]
        room = later[: max(1, len(later) - (n_stages - 1 - stage))]
        if later:
            bounds.append(min(room, key=lambda i: abs(total[i] - target)))
    bounds.append(len(names))
    stages = tuple(StagePlan(i, i, tuple(names[a:b])) for i, (a, b) in enumerate(itertools.pairwise(bounds)))
    return Plan(
        model=graph.model,
        graph_digest=graph.digest,
        stages=stages,
        boundaries=(),
        ties=(),
        schedule="gpipe",
        n_microbatches=1,
        step_s=0.0,
        bounds=Bounds(0.0, 0.0, 0.0, False),
        cluster=cluster,
    )
