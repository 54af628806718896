"""What the report's script draws, as compact JSON: the op graph, the module tree, the timelines.

Text and tables are left to ``report``; drawing to the scripts beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..costs import CostTable
from ..graph import Op, OpGraph
from ..plans import Plan
from ..simulator import Event, Timeline
from .graph_lanes import lanes
from .tables import place, shape

__all__ = ["graph_payload", "time_payload", "tree_payload"]

KINDS = ("F", "B", "I", "W", "run", "uneven", "ties", "loss", "optimizer")
GLUE = "glue"
"""What a module's own forward calls besides its children, kept together in the tree."""
MOST_EVENTS = 300_000
"""Actions drawn one by one; above it neighbours on a rank are joined, since no screen shows more."""


def graph_payload(graph: OpGraph, plan: Plan, costs: CostTable | None) -> dict[str, Any]:
    """Columns over the ops in program order; ``takes`` holds row numbers."""
    dims = dict(costs.dims) if costs is not None and costs.dims else graph.example_dims
    cost = [costs[op.name] if costs is not None else None for op in graph.ops]
    return {
        "name": [op.name for op in graph.ops],
        "kind": [op.kind for op in graph.ops],
        "target": [op.target for op in graph.ops],
        "source": [place(op.source) for op in graph.ops],
        "stages": [list(plan.stages_of.get(op.name, ())) for op in graph.ops],
        "lane": list(lanes(graph)),
        "takes": [[graph.position[name] for name in graph.takes[op.name]] for op in graph.ops],
        "value": [" ".join(map(shape, op.outputs)) for op in graph.ops],
        "bytes": [op.bytes_at(dims) for op in graph.ops],
        "parameters": [_parameter_bytes(graph, op) for op in graph.ops],
        "forward": [_figure(c.forward_s) if c else 0 for c in cost],
        "backward": [_figure(c.backward_s) if c else 0 for c in cost],
        "saved": [c.saved_bytes if c else 0 for c in cost],
        "cross": sorted(graph.position[b.value] for b in plan.boundaries if b.value in graph.position),
    }


def _parameter_bytes(graph: OpGraph, op: Op) -> int:
    return sum(graph.parameter[p].bytes for p in op.parameters if p in graph.parameter)


def _figure(x: float) -> float:
    """Five significant digits: what a screen can show."""
    return float(f"{x:.5g}")


def tree_payload(graph: OpGraph, plan: Plan, costs: CostTable | None) -> dict[str, Any]:
    """The module tree: per node its name, row of an op, seconds, weights, time by stage, children."""
    root = _Node(graph.model)
    seen: set[str] = set()
    for row, op in enumerate(graph.ops):
        if op.kind in ("input", "output"):
            continue
        path = op.target if op.kind == "module" else ".".join(filter(None, (op.module_path, GLUE, op.name)))
        fresh = [p for p in op.parameters if p in graph.parameter and graph.parameter[p].name not in seen]
        seen |= {graph.parameter[p].name for p in fresh}
        weights = sum(graph.parameter[p].bytes for p in fresh)
        seconds = costs[op.name].seconds if costs is not None else 0.0
        root.add(path.split("."), row, seconds, weights, plan.stages_of.get(op.name, ()))
    return root.to_dict()


class _Node:
    """One module, or an op of glue code under it, gathering what is below."""

    __slots__ = ("bytes", "children", "name", "row", "seconds", "stages")

    def __init__(self, name: str) -> None:
        self.name = name
        self.row = -1
        self.seconds = 0.0
        self.bytes = 0
        self.stages: dict[int, float] = {}
        self.children: dict[str, _Node] = {}

    def add(self, path: Sequence[str], row: int, seconds: float, weights: int, stages: Iterable[int]) -> None:
        node = self
        for part in (None, *path):
            if part is not None:
                node = node.children.setdefault(part, _Node(part))
            node.seconds += seconds
            node.bytes += weights
            for s in stages:
                node.stages[s] = node.stages.get(s, 0.0) + seconds
        node.row = row

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"n": self.name, "s": _figure(self.seconds), "b": self.bytes}
        out["g"] = [[s, _figure(t)] for s, t in sorted(self.stages.items())]
        if self.row >= 0:
            out["r"] = self.row
        if self.children:
            out["c"] = [child.to_dict() for child in self.children.values()]
        return out


def time_payload(
    plan: Plan,
    predicted: Timeline,
    measured: Timeline | None,
    limits: Sequence[int | None],
    held: Sequence[int],
) -> dict[str, Any]:
    """Per rank what is predicted and measured: actions, memory over time, its limit and peak; times in ns."""
    ranks = range(plan.n_ranks)
    join = math.ceil(len(predicted.events) / MOST_EVENTS)
    tracks = _tracks(predicted.events, len(ranks), join)
    ran = _tracks(measured.events, len(ranks), join) if measured is not None else None
    return {
        "step": predicted.step_s,
        "measured": measured.step_s if measured is not None else None,
        "limits": list(limits) or [None] * len(ranks),
        "held": list(held) or [None] * len(ranks),
        "stages": [[s.index for s in plan.stages if s.rank == r] for r in ranks],
        "predicted": tracks,
        "critical": _critical(predicted, len(ranks)) if join <= 1 else [[] for _ in ranks],
        "ran": ran,
        "memory": [[x for t, b in predicted.memory_over_time(r) for x in (_ns(t), int(b))] for r in ranks],
    }


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _tracks(events: Iterable[Event], n_ranks: int, join: int) -> list[list[int]]:
    """Per rank a flat list of (idle before, duration, stage, index in KINDS, microbatch)."""
    rows: list[list[tuple[int, ...]]] = [[] for _ in range(n_ranks)]
    for rank, action, start_s, end_s in events:
        if isinstance(action, str):
            what = (0, KINDS.index(action), 0)
        else:
            what = (action.stage, KINDS.index(action.kind), action.microbatch)
        rows[rank].append((_ns(start_s), _ns(end_s), *what))
    return [_flat(_joined(sorted(row), join)) for row in rows]


def _critical(timeline: Timeline, n_ranks: int) -> list[list[int]]:
    """Per rank, the places in its track of what makes the step as long as it is."""
    chain = {(e.rank, e.action) for e in timeline.critical_path if isinstance(e, Event)}
    rows: list[list[Event]] = [[] for _ in range(n_ranks)]
    for event in timeline.events:
        rows[event.rank].append(event)
    return [
        [
            i
            for i, e in enumerate(sorted(row, key=lambda e: (e.start_s, e.end_s)))
            if (e.rank, e.action) in chain
        ]
        for row in rows
    ]


def _flat(row: Iterable[tuple[int, ...]]) -> list[int]:
    flat: list[int] = []
    now = 0
    for start, end, *what in row:
        flat += [start - now, end - start, *what]
        now = end
    return flat


def _joined(row: list[tuple[int, ...]], n: int) -> Iterable[tuple[int, ...]]:
    """Every ``n`` neighbours as one event of kind ``run``, which counts them."""
    if n <= 1:
        return row
    runs = [row[i : i + n] for i in range(0, len(row), n)]
    return [(run[0][0], run[-1][1], run[0][2], KINDS.index("run"), len(run)) for run in runs]
