"""A small plan by hand, for tests that need one without solving."""

from __future__ import annotations

from autopipe.hardware import Cluster, Link
from autopipe.plans import Boundary, Bounds, Plan, StagePlan, Tie


def make_plan(n_stages: int = 4, n_microbatches: int = 8, schedule: str = "1f1b", **changes) -> Plan:
    """A chain of equal stages on as many ranks, a skip over one stage, the first and last stage tied."""
    stages = tuple(
        StagePlan(
            index=s,
            rank=s,
            ops=(f"op{s}",),
            forward_s=1.0,
            backward_s=2.0,
            backward_input_s=1.0,
            backward_weight_s=1.0,
            parameter_bytes=400,
            gradient_bytes=400,
            saved_bytes=1000,
            workspace_bytes=50,
        )
        for s in range(n_stages)
    )
    boundaries = [Boundary(f"op{s}", s, (s + 1,), 500) for s in range(n_stages - 1)]
    if n_stages > 2:
        boundaries[0] = Boundary("op0", 0, (1, 2), 500)
    fields = {
        "model": "hand-made",
        "graph_digest": "0" * 16,
        "stages": stages,
        "boundaries": tuple(boundaries),
        "ties": (Tie("weight", ("weight", "head.weight"), (0, n_stages - 1), 200, seconds=0.25),),
        "schedule": schedule,
        "n_microbatches": n_microbatches,
        "step_s": 0.0,
        "bounds": Bounds(3.0, 3.0, 0.0, True),
        "cluster": Cluster.uniform(n_stages, link=Link(0.01, 1e5)),
        "settings": {"optimizer_s_per_byte": 1e-4},
    }
    return Plan(**{**fields, **changes})
