"""The tables of each data type: the first is the main one, a headline says the rest in a line.

How a table prints is left to ``table``; pictures to ``svg``.
"""

from __future__ import annotations

import functools
from typing import Any

from ..costs import CostTable, OpCost
from ..graph import OpGraph, TensorSpec
from ..plans import Plan, StagePlan
from ..schedule import Schedule
from ..simulator import Report, Timeline
from .colours import bar, swatch
from .table import Column, Table, count, nbytes, percent, runs, seconds, word

__all__ = [
    "boundary_table",
    "candidate_table",
    "certificate",
    "headline",
    "stage_table",
    "tables",
    "tie_table",
]


@functools.singledispatch
def headline(item: Any) -> str:
    """One line: what it is and its most telling figures."""
    raise TypeError(f"nothing here knows how to show a {type(item).__name__}")


@functools.singledispatch
def tables(item: Any) -> tuple[Table, ...]:
    """Every table of an object, the main one first."""
    raise TypeError(f"nothing here knows how to show a {type(item).__name__}")


# Plan


@headline.register
def _(plan: Plan) -> str:
    ranks = f"{plan.n_stages} stages on {plan.n_ranks} ranks"
    if crowd := plan.cluster.crowd:
        ranks += f" ({crowd[0]} of which share {_n(crowd[1], 'core', 'cores')})"
    run = f"{plan.schedule}, {_n(plan.n_microbatches, 'microbatch', 'microbatches')}"
    return f"{plan.model}: {ranks}, {run}, step {seconds(plan.step_s)} predicted, {certificate(plan)}"


def certificate(plan: Plan) -> str:
    """How good the cut is known to be, in a few words."""
    if plan.bounds.proved:
        return "cut proved optimal"
    if plan.bounds.bottleneck_lower_s <= 0:
        return "no bound on the cut"
    return f"cut within {percent(plan.bounds.gap)} of optimal"


@tables.register
def _(plan: Plan) -> tuple[Table, ...]:
    every = (stage_table(plan), boundary_table(plan), tie_table(plan), candidate_table(plan))
    return (every[0], *(t for t in every[1:] if t.rows))


def stage_table(plan: Plan) -> Table:
    """One row per stage."""
    again = any(s.recompute or s.recomputed for s in plan.stages)
    columns = (
        Column("stage", "stage", count, swatch),
        Column("rank", "rank", count),
        Column("first", "first op", extra=True),
        Column("last", "last op", extra=True),
        Column("n_ops", "ops", count, extra=True),
        Column("forward_s", "forward", seconds),
        Column("backward_s", "backward", seconds),
        Column("load", "load", percent, bar),
        Column("parameter_bytes", "weights", nbytes),
        Column("saved_bytes", "saved", nbytes, extra=True),
        Column("in_flight", "in flight", count, extra=True),
        Column("memory_bytes", "memory", nbytes),
        *(Column("again", "runs again"),) * again,
    )
    longest = max((s.seconds for s in plan.stages), default=0.0) or 1.0
    rows = tuple((*_stage_row(s, longest), *(_again(s),) * again) for s in plan.stages)
    note = "Times per microbatch; load relative to the slowest stage."
    if tail := plan.settings.get("tail"):
        note += f" {tail}."
    return Table("Stages", columns, rows, note)


def _stage_row(s: StagePlan, longest: float) -> tuple[Any, ...]:
    own = [op for op in s.ops if op not in set(s.clones)] or list(s.ops) or [""]
    times = (s.forward_s, s.backward_s, s.seconds / longest)
    memory = (s.parameter_bytes, s.saved_bytes, s.in_flight, s.memory_bytes)
    return (s.index, s.rank, own[0], own[-1], len(s.ops), *times, *memory)


def _again(s: StagePlan) -> str:
    """What a stage computes again in backward, in its ops' names."""
    blocks = [ops[0] if len(ops) == 1 else f"{ops[0]} to {ops[-1]}" for ops in s.recomputed]
    return "all of it" if s.recompute else ", ".join(blocks)


def boundary_table(plan: Plan) -> Table:
    """What crosses between stages, and what is computed again instead."""
    columns = (
        Column("value", "value"),
        Column("source", "from stage"),
        Column("destinations", "to stages", runs),
        Column("n_bytes", "size", nbytes),
        Column("way", "way"),
    )
    sent = [
        (b.value, b.source, b.destinations, b.n_bytes, "sent, gradient back" if b.differentiable else "sent")
        for b in plan.boundaries
    ]
    clones = sorted({op for s in plan.stages for op in s.clones})
    again = [(op, None, plan.stages_of[op], None, "recomputed in each") for op in clones]
    return Table("Boundaries", columns, (*sent, *again), "Sizes per microbatch and direction.")


def tie_table(plan: Plan) -> Table:
    """Parameters that several stages use."""
    columns = (
        Column("parameter", "parameter"),
        Column("names", "names"),
        Column("stages", "stages", runs),
        Column("n_bytes", "size", nbytes),
        Column("mode", "mode"),
        Column("seconds", "per step", seconds),
    )
    rows = tuple((t.parameter, t.names, t.stages, t.n_bytes, t.mode, t.seconds) for t in plan.ties)
    return Table("Tied parameters", columns, rows)


def candidate_table(plan: Plan) -> Table:
    """What else was simulated."""
    columns = (
        Column("label", "alternative"),
        Column("schedule", "schedule"),
        Column("n_stages", "stages", count),
        Column("n_microbatches", "microbatches", count),
        Column("step_s", "step", seconds),
        Column("relative", "vs plan", lambda x: "–" if x is None else f"{x:.3f}×"),
        Column("memory_bytes", "fullest rank", nbytes),
        Column("feasible", "fits", lambda ok: "yes" if ok else "no"),
    )
    base = plan.step_s or None
    rows = tuple(
        (
            c.label,
            c.schedule,
            c.n_stages,
            c.n_microbatches,
            c.step_s,
            c.step_s / base if base else None,
            c.memory_bytes,
            c.feasible,
        )
        for c in plan.candidates
    )
    more = plan.n_candidates - len(rows)
    note = f"The best of each schedule and count; {more} more were simulated." if more > 0 else ""
    return Table("Alternatives", columns, rows, note)


# OpGraph


@headline.register
def _(graph: OpGraph) -> str:
    weights = [p for p in graph.parameters if not p.is_buffer]
    size = f"{sum(p.numel for p in weights):,} parameters ({nbytes(sum(p.bytes for p in weights))})"
    dims = ", ".join(f"{d.name}={d.example}" for d in graph.dims)
    tied = sum(len(p.names) > 1 for p in weights)
    parts = [f"{graph.model}: {_n(len(graph.compute), 'op')}", size]
    parts += [f"{tied} tied"] if tied else []
    return ", ".join([*parts, f"sizes that may change: {dims}"] if dims else parts)


@tables.register
def _(graph: OpGraph) -> tuple[Table, ...]:
    columns = (
        Column("op", "op"),
        Column("kind", "kind"),
        Column("target", "calls"),
        Column("takes", "takes"),
        Column("value", "value"),
        Column("bytes", "size", nbytes),
        Column("n_parameters", "parameters", count),
        Column("notes", "notes"),
        Column("source", "source"),
    )
    dims = graph.example_dims
    takes: dict[str, list[str]] = {op.name: [] for op in graph.ops}
    for producer, consumer in graph.edges:
        takes[consumer].append(producer)
    rows = tuple(
        (
            op.name,
            op.kind,
            op.target,
            tuple(takes[op.name]),
            " ".join(map(shape, op.outputs)) or ("size" if op.is_size else ""),
            op.bytes_at(dims),
            sum(graph.parameter[p].numel for p in op.parameters if p in graph.parameter),
            _notes(op),
            place(op.source),
        )
        for op in graph.ops
    )
    return (Table("Ops in program order", columns, rows, f"Sizes at {word(_dims(dims))}."),)


def place(source: str) -> str:
    """A file and line without the folders of the machine it is on."""
    inside = source.replace("\\", "/").rpartition("site-packages/")[2]
    return "/".join(inside.split("/")[-3:])


def shape(tensor: TensorSpec) -> str:
    """A tensor's type as people write it: ``float32[batch, 128]``."""
    return f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"


def _notes(op: Any) -> tuple[str, ...]:
    flags = ("is_random", "is_tainted", "is_movable")
    notes = [f.removeprefix("is_") for f in flags if getattr(op, f)]
    notes += ["mutates " + ", ".join(op.mutated_buffers)] if op.mutated_buffers else []
    return (*notes, *([f"{op.mode} only"] if op.mode != "both" else []))


# CostTable


@headline.register
def _(costs: CostTable) -> str:
    total = costs.total(costs.costs)
    where = f"{costs.source} on {costs.device}" if costs.device else costs.source
    parts = [f"{_n(len(costs.costs), 'op')} {where}", f"forward {seconds(total.forward_s)}"]
    parts += [f"backward {seconds(total.backward_s)}", f"saved {nbytes(total.saved_bytes)}"]
    if costs.residual is not None:
        parts.append(f"whole model {costs.residual:+.1%} against their sum")
    return ", ".join([*parts, *([f"at {_dims(costs.dims)}"] if costs.dims else [])])


@tables.register
def _(costs: CostTable) -> tuple[Table, ...]:
    columns = (
        Column("op", "op"),
        Column("forward_s", "forward", seconds),
        Column("backward_s", "backward", seconds),
        Column("share", "share", percent),
        Column("saved_bytes", "saved", nbytes),
        Column("workspace_bytes", "workspace", nbytes),
        Column("flops", "FLOPs", lambda n: f"{n:.3g}"),
        Column("source", "source"),
        Column("spread", "spread", percent),
    )
    whole = sum(c.seconds for c in costs.costs.values()) or 1.0
    rows = tuple(
        (op, c.forward_s, c.backward_s, c.seconds / whole, *_rest(c)) for op, c in costs.costs.items()
    )
    return (Table("Costs per microbatch", columns, rows),)


def _rest(c: OpCost) -> tuple[Any, ...]:
    return c.saved_bytes, c.workspace_bytes, c.flops, c.source, c.spread


# Schedule


@headline.register
def _(schedule: Schedule) -> str:
    runs = _n(schedule.n_microbatches, "microbatch", "microbatches")
    return f"{schedule.name}: {schedule.n_stages} stages on {schedule.n_ranks} ranks, {runs}"


@tables.register
def _(schedule: Schedule) -> tuple[Table, ...]:
    columns = (
        Column("rank", "rank", count),
        Column("order", "order", count),
        Column("stage", "stage", count),
        Column("kind", "kind"),
        Column("microbatch", "microbatch", count),
    )
    rows = tuple(
        (rank, i, a.stage, a.kind, a.microbatch)
        for rank, row in enumerate(schedule.actions)
        for i, a in enumerate(row)
    )
    return (Table("Actions", columns, rows),)


# Timeline


@headline.register
def _(timeline: Timeline) -> str:
    idle = f"{percent(timeline.bubble_fraction)} of all ranks' time idle"
    return f"{headline(timeline.schedule)}, step {seconds(timeline.step_s)} {timeline.source}, {idle}"


@tables.register
def _(timeline: Timeline) -> tuple[Table, ...]:
    columns = (
        Column("rank", "rank", count),
        Column("action", "action"),
        Column("start_s", "start", seconds),
        Column("end_s", "end", seconds),
        Column("seconds", "long", seconds),
    )
    rows = tuple((e.rank, str(e.action), e.start_s, e.end_s, e.end_s - e.start_s) for e in timeline.events)
    return (rank_table(timeline), Table("Events", columns, rows))


def rank_table(timeline: Timeline) -> Table:
    """One row per rank: busy, idle by cause, peak memory."""
    causes = ("warmup", "drain", "imbalance", "communication")
    columns = (
        Column("rank", "rank", count),
        Column("stages", "stages", runs),
        Column("busy_s", "busy", seconds),
        Column("idle", "idle", percent),
        *(Column(f"{cause}_s", cause, seconds) for cause in causes),
        Column("peak_bytes", "peak memory", nbytes),
    )
    step = timeline.step_s or 1.0
    peaks = timeline.peak_bytes or (None,) * timeline.schedule.n_ranks
    rows = tuple(
        (
            r,
            timeline.schedule.stages_of(r),
            busy,
            1 - busy / step,
            *(getattr(idle, f"{cause}_s") for cause in causes),
            peak,
        )
        for r, (busy, idle, peak) in enumerate(zip(timeline.busy_s, timeline.bubbles, peaks, strict=True))
    )
    return Table("Ranks", columns, rows, "Idle time by cause; a dash where memory is unknown.")


# Report of a run


@headline.register
def _(report: Report) -> str:
    times = f"{seconds(report.predicted_step_s)} predicted, {seconds(report.measured_step_s)} measured"
    times += ", all ranks in turn in one process" if report.in_turn else ""
    over = _over(report.measured_step_s, report.predicted_step_s)
    return f"{report.plan.model}: step {times}, ratio {ratio(over)}"


@tables.register
def _(report: Report) -> tuple[Table, ...]:
    columns = (
        Column("stage", "stage", count, swatch),
        Column("rank", "rank", count),
        Column("kind", "action"),
        Column("predicted_s", "predicted", seconds),
        Column("measured_s", "measured", seconds),
        Column("ratio", "ratio", ratio),
    )
    rows = tuple(
        (s.index, s.rank, kind, s.predicted[kind], took, _over(took, s.predicted[kind]))
        for s in report.stages
        for kind, took in s.measured.items()
    )
    note = f"Medians over {_n(report.n_steps, 'step')}, per microbatch."
    held = (_held_table(report),) if report.peak_bytes else ()
    return (Table("Predicted and measured", columns, rows, note), *held)


def _held_table(report: Report) -> Table:
    columns = (
        Column("rank", "rank", count),
        Column("predicted_bytes", "predicted", nbytes),
        Column("measured_bytes", "measured", nbytes),
        Column("ratio", "ratio", ratio),
    )
    pairs = zip(report.predicted_peak_bytes, report.peak_bytes, strict=True)
    rows = tuple((rank, said, held, _over(held, said)) for rank, (said, held) in enumerate(pairs))
    return Table("Memory, predicted and measured", columns, rows, "The most each rank held.")


def _over(measured: float, predicted: float) -> float | None:
    return measured / predicted if predicted else None


def ratio(x: float | None) -> str:
    """A ratio as people read it; a dash where there is none."""
    return "–" if x is None else f"{x:.2f}"


def _dims(dims: Any) -> str:
    return ", ".join(f"{k}={v}" for k, v in dims.items())


def _n(n: int, one: str, many: str = "") -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"
