"""The plan: which stage and rank computes what, what crosses, what is tied, and what it should cost.

Making plans is left to ``solve``, building modules from them to ``stages``. Readable without torch or the
model.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, TypedDict

from .arguments import brief
from .costs import Degrees
from .errors import InputError, PlanError
from .graph import Op, OpGraph, ParameterSpec
from .hardware import Cluster
from .plandiff import PlanDiff, changed
from .presets import Offload, Optimizer, Precision
from .schedule import NAMES
from .schedule import build as build_schedule
from .schema import (
    Bytes,
    Count,
    Index,
    Line,
    Name,
    Positive,
    Seconds,
    Share,
    build,
    differs,
    load,
    parse,
    refuse,
    versioned,
    written,
)
from .shown import Shown
from .units import parse_bytes

__all__ = [
    "Boundary",
    "Bounds",
    "Candidate",
    "Plan",
    "PlanDiff",
    "StagePlan",
    "Tie",
    "check_between",
    "check_plan",
    "crossing",
    "shared",
]

VERSION = 2


@dataclasses.dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage: a convex piece of the op graph, and what one microbatch of it should cost.

    Attributes
    ----------
    index, rank: the stage's number from 0 and the rank that holds it.
    ops: the ops it computes, in program order, clones included.
    clones: those of ``ops`` that another stage computes too, because that is cheaper than sending them.
    recompute: drop saved activations after forward and run forward again before backward.
    recomputed: otherwise, the blocks whose saved activations are dropped, each a tuple of ops that are run
        again together when backward comes to them.
    forward_s, backward_s, backward_input_s, backward_weight_s: per microbatch, recompute included in
        backward, communication left out.
    parameter_bytes: weights held, tied copies included (buffers too).
    gradient_bytes: of the parameters that require a gradient.
    saved_bytes: kept for backward, per microbatch in flight; what blocks hold to run again included.
    held_bytes: that part of ``saved_bytes`` which blocks hold to run again.
    n_trained: how many parameters require a gradient: an optimizer takes time for each, whatever its size.
    workspace_bytes: peak above the rest while an action runs.
    in_flight: most microbatches alive at once under the plan's schedule.
    memory_bytes: predicted peak: weights, gradients, optimizer state, in flight × saved, workspace, buffers.
    """

    index: Index
    rank: Index
    ops: tuple[Name, ...]
    clones: tuple[Name, ...] = ()
    recompute: bool = False
    forward_s: Seconds = 0.0
    backward_s: Seconds = 0.0
    backward_input_s: Seconds = 0.0
    backward_weight_s: Seconds = 0.0
    parameter_bytes: Bytes = 0
    gradient_bytes: Bytes = 0
    saved_bytes: Bytes = 0
    workspace_bytes: Bytes = 0
    in_flight: Index = 1
    memory_bytes: Bytes = 0
    recomputed: tuple[tuple[Name, ...], ...] = ()
    held_bytes: Bytes = 0
    n_trained: Index = 0

    @property
    def seconds(self) -> float:
        """Forward and backward of one microbatch."""
        return self.forward_s + self.backward_s


@dataclasses.dataclass(frozen=True, slots=True)
class Boundary:
    """A value that crosses from the stage that computes it to later stages that use it.

    ``n_bytes`` is per microbatch and direction; ``differentiable`` values send a gradient back.
    """

    value: Name
    source: Index
    destinations: tuple[Index, ...]
    n_bytes: Bytes
    differentiable: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Tie:
    """A parameter that several stages use: its gradients are summed once per step.

    ``mode`` is ``sync`` (a copy in each stage, an all-reduce of ``n_bytes`` costing ``seconds`` per step)
    or ``colocate`` (all users in one stage, or stages of one rank; no traffic).
    """

    parameter: Name
    names: tuple[Name, ...]
    stages: tuple[Index, ...]
    n_bytes: Bytes
    mode: Literal["sync", "colocate"] = "sync"
    seconds: Seconds = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """What no plan can beat, in the cost model the plan was solved in.

    ``bottleneck_s`` is the plan's largest stage load per microbatch (compute + exposed communication) and
    ``bottleneck_lower_s`` a certified lower bound on it; ``step_lower_s`` bounds the step time. ``proved``
    says that the bottleneck bound is met.
    """

    bottleneck_s: Seconds
    bottleneck_lower_s: Seconds
    step_lower_s: Seconds
    proved: bool

    @property
    def gap(self) -> float:
        """How far above the lower bound the bottleneck may be, relative; 0 when proved."""
        if self.proved:
            return 0.0
        if self.bottleneck_lower_s <= 0:
            return float("inf")
        return self.bottleneck_s / self.bottleneck_lower_s - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One alternative the solver simulated: what it was, its step time and the memory of its fullest rank."""

    label: Line
    schedule: Name
    n_stages: Index
    n_microbatches: Index
    step_s: Seconds
    memory_bytes: Bytes
    feasible: bool = True


@dataclasses.dataclass(frozen=True)
class Plan(Shown):
    """A pipeline's plan. Times are seconds per microbatch unless named ``step_s``.

    Attributes
    ----------
    model, graph_digest: what was planned.
    stages: in order; ``len(stages)`` is the number of stages.
    boundaries, ties: what crosses between stages, and parameters that live in several.
    schedule, n_microbatches: how a step runs.
    step_s: predicted seconds of a step.
    bounds: certificate of how far its bottleneck and its step can be from the least.
    cluster: the ranks it was made for.
    candidates: what else was simulated, the uniform and by-parameters splits among them, best first. Of
        other schedules and counts of stages only the best of each is kept.
    n_candidates: how many were simulated in all.
    degrees: over how many ranks each stage is spread beside the pipeline.
    settings: how it was asked for: balance, ties, pins, memory limit, optimizer, cost source, dims, versions.
    """

    model: Name
    graph_digest: Name
    stages: tuple[StagePlan, ...]
    boundaries: tuple[Boundary, ...]
    ties: tuple[Tie, ...]
    schedule: Name
    n_microbatches: Index
    step_s: Seconds
    bounds: Bounds
    cluster: Cluster
    candidates: tuple[Candidate, ...] = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    n_candidates: Count = 0
    degrees: Degrees = dataclasses.field(default_factory=Degrees)

    @property
    def n_stages(self) -> int:
        return len(self.stages)

    @property
    def n_ranks(self) -> int:
        return self.cluster.n_ranks

    @functools.cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return tuple(s.rank for s in self.stages)

    @functools.cached_property
    def stages_of(self) -> Mapping[str, tuple[int, ...]]:
        """The stages that compute each op: one, or several for a clone."""
        out: dict[str, tuple[int, ...]] = {}
        for stage in self.stages:
            for op in stage.ops:
                out[op] = (*out.get(op, ()), stage.index)
        return out

    def diff(self, other: Plan) -> PlanDiff:
        """What is different in ``other``, which must be a plan. Linear in the ops of both."""
        _check_kind("other", other)
        rows = zip(_figures(self), _figures(other), strict=True)
        return PlanDiff(
            figures=tuple((what, a, b, unit) for (what, a, unit), (_, b, _) in rows),
            schedule=(self.schedule, other.schedule),
            moved=changed(self.stages_of, other.stages_of),
            crossing=changed(
                {b.value: (b.source, *b.destinations) for b in self.boundaries},
                {b.value: (b.source, *b.destinations) for b in other.boundaries},
            ),
            ties=changed(
                {t.parameter: (t.mode, *t.stages) for t in self.ties},
                {t.parameter: (t.mode, *t.stages) for t in other.ties},
            ),
        )

    def to_json(self, path: str | pathlib.Path | None = None) -> str:
        """The plan as JSON text, also written to ``path`` when given."""
        text = written(_to_dict(self), indent=1)
        if path is not None:
            pathlib.Path(path).write_text(text)
        return text

    @classmethod
    def from_json(cls, source: str | pathlib.Path) -> Plan:
        """A plan from JSON text or the path of a file that holds it.

        Raises :class:`StoreError` when it is damaged or of another version, with the path to what does not
        fit. Nothing in a plan is ever run.
        """
        if isinstance(source, str) and source.lstrip()[:1] in ("{", "["):
            return _from_dict(parse(source, "the plan"), "the plan")
        return _from_dict(load(source, "the plan"), f"the plan {source}")


def check_plan(plan: Any) -> None:
    """Raise :class:`InputError` for what is no plan, :class:`PlanError` for one that contradicts itself.

    As one does that was edited by hand. Linear in its ops.
    """
    _check_kind("plan", plan)
    for path, fault in _faults(plan):
        raise PlanError(f"the plan contradicts itself: its {path} {fault}; plan again, or change both")


def check_between(plan: Plan, graph: OpGraph) -> None:
    """Raise :class:`PlanError` where what crosses or is tied is not what its stages and the graph make so.

    As in a plan whose stages were edited by hand. Linear in ops and edges.
    """
    crosses = crossing(graph, plan.stages_of, plan.n_stages)
    ties = shared(graph, plan.stages_of)
    for what, said, made in (
        (
            "boundaries",
            {b.value: (b.source, tuple(sorted(b.destinations))) for b in plan.boundaries},
            {op.name: (min(plan.stages_of[op.name]), there) for op, there in crosses},
        ),
        (
            "ties",
            {t.parameter: (tuple(sorted(t.stages)), t.names) for t in plan.ties},
            {p.name: (stages, p.names) for p, stages in ties},
        ),
    ):
        if said != made:
            name = next(name for name in {**made, **said} if said.get(name) != made.get(name))
            words = [f"{name!r} as {rows[name]}" if name in rows else "nothing" for rows in (said, made)]
            raise PlanError(
                f"the plan's {what} have {words[0]}, and its stages make that {words[1]} for this "
                f"{graph.model}; plan again, or change both"
            )


def crossing(
    graph: OpGraph, stages_of: Mapping[str, Collection[int]], n_stages: int
) -> Iterator[tuple[Op, tuple[int, ...]]]:
    """Ops whose values are sent, and where: to stages with an op that takes them and none that makes them.

    What no stage computes, as the model's outputs, is in the last.
    """
    last = (n_stages - 1,)
    for op in graph.compute:
        here, there = stages_of[op.name], set[int]()
        for taker in graph.consumers[op.name]:
            stages = stages_of.get(taker, last)
            if stages != here:
                there.update(stages)
        if there := there.difference(here):
            yield op, tuple(sorted(there))


def shared(
    graph: OpGraph, stages_of: Mapping[str, Collection[int]]
) -> Iterator[tuple[ParameterSpec, tuple[int, ...]]]:
    """Parameters that are trained and used by several stages or known by several names, and their stages."""
    for name, ops in graph.users.items():
        p = graph.parameter[name]
        if p.requires_grad and not p.is_buffer:
            stages = {s for op in ops for s in stages_of[op]}
            if len(stages) > 1 or len(p.names) > 1:
                yield p, tuple(sorted(stages))


def _check_kind(name: str, value: Any) -> None:
    if not isinstance(value, Plan):
        raise InputError(f"{name} is {brief(value)}; it must be a Plan: Plan.from_json reads one from a file")


def _figures(plan: Plan) -> tuple[tuple[str, float, str], ...]:
    """What plans are compared by: (what, value, unit)."""
    return (
        ("step", plan.step_s, "s"),
        ("slowest stage", plan.bounds.bottleneck_s, "s"),
        ("fullest rank", max(_rank_bytes(plan, rank) for rank in range(plan.n_ranks)), "bytes"),
        (
            "sent forward per microbatch",
            sum(b.n_bytes * len(b.destinations) for b in plan.boundaries),
            "bytes",
        ),
        ("stages", plan.n_stages, ""),
        ("ranks", plan.n_ranks, ""),
        ("microbatches", plan.n_microbatches, ""),
        ("gap of the bottleneck", plan.bounds.gap, "share"),
    )


def _rank_bytes(plan: Plan, rank: int) -> int:
    """A rank's peak: what stays of its stages, tied copies once, and the fullest moment of its schedule."""
    own = [s for s in plan.stages if s.rank == rank]
    if len(own) < 2:
        return sum(s.memory_bytes for s in own)
    still = sum(s.memory_bytes - s.in_flight * s.saved_bytes - s.workspace_bytes for s in own)
    ratio = 2 + float(plan.settings.get("optimizer_bytes_per_parameter_byte", 2.0))
    for tie in plan.ties:
        copies = sum(s.index in tie.stages for s in own)
        still -= round(max(0, copies - 1) * tie.n_bytes * ratio)
    schedule = build_schedule(
        plan.schedule, plan.n_ranks, plan.n_stages, plan.n_microbatches, placement=plan.placement
    )
    return still + max(
        sum(n * s.saved_bytes for n, s in zip(alive, own, strict=True)) + own[x].workspace_bytes
        for alive, x in schedule.moments[rank]
    )


def _to_dict(plan: Plan) -> dict[str, Any]:
    out = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    for name in ("stages", "boundaries", "ties", "candidates"):
        out[name] = [dataclasses.asdict(item) for item in out[name]]
    out |= {"bounds": dataclasses.asdict(plan.bounds), "cluster": plan.cluster.to_dict()}
    out["degrees"] = dataclasses.asdict(plan.degrees)
    return {"version": VERSION, **out, "settings": dict(plan.settings)}


@dataclasses.dataclass(frozen=True)
class _PlanFile(Plan):
    """A plan whose cluster is still as its file has it."""

    cluster: dict[str, Any]  # type: ignore[assignment]


class _Settings(TypedDict, total=False):
    """What a plan's settings may be."""

    balance: Literal["cost", "parameters", "uniform", "callable"]
    ties: Literal["auto", "sync", "colocate"]
    pin: dict[Name, int]
    together: list[list[Name]]
    uncut: list[Name]
    clone: Literal["auto", "never", "always"]
    sender_pays: Literal["once", "receiver"]
    recompute: Literal["never", "auto", "always"]
    overlap: bool
    memory_limit: Bytes | str | list[Bytes | str] | None
    optimizer_bytes_per_parameter_byte: Share
    optimizer_s_per_byte: Seconds
    optimizer_s_per_tensor: Seconds
    start_s: Seconds
    jitter_s: Seconds
    alone: Positive
    costs: Line
    costs_of: Line
    dims: dict[Name, Count]
    versions: dict[Name, Line]
    ranks: list[Index]
    steps_by_microbatches: dict[Name, Seconds]
    opened: list[Name]
    opened_from: Line
    uncounted: Line
    precision: Precision | Literal[""]
    optimizer: Optimizer
    offload: Offload
    tail: Line


def _from_dict(data: dict[str, Any], what: str) -> Plan:
    read = build(_PlanFile, versioned(data, VERSION, what), what)
    build(_Settings, read.settings, f"{what}, settings:")
    if unknown := sorted({*read.settings} - {*_Settings.__annotations__}):
        raise refuse(what, f"settings[{unknown[0]!r}]", "is no setting of a plan")
    cluster = Cluster.from_dict(read.cluster, f"{what}, cluster:")
    fields = {f.name: getattr(read, f.name) for f in dataclasses.fields(Plan)}
    plan = Plan(**{**fields, "cluster": cluster})
    differs(data, json.loads(plan.to_json()), what)
    for path, fault in _faults(plan):
        raise refuse(what, path, fault)
    return plan


def _faults(plan: Plan) -> Iterator[tuple[str, str]]:
    """(path, fault) of parts that contradict one another."""
    n = plan.n_stages
    if not n or not plan.n_microbatches:
        yield ("n_microbatches" if n else "stages"), "has none; there is at least one"
    for place, schedule in [
        ("schedule", plan.schedule),
        *((f"candidates[{x}].schedule", c.schedule) for x, c in enumerate(plan.candidates)),
    ]:
        if schedule not in NAMES:
            yield place, f"is {schedule!r}; known are {', '.join(NAMES)}"
    yield from _faults_of_stages(plan)
    yield from _faults_of_bounds(plan)
    yield from _faults_between(plan)
    yield from _faults_of_settings(plan)


def _faults_of_stages(plan: Plan) -> Iterator[tuple[str, str]]:
    n, ranks = plan.n_stages, plan.n_ranks
    for x, stage in enumerate(plan.stages):
        place, own = f"stages[{x}]", set(stage.ops)
        again = [op for ops in stage.recomputed for op in ops]
        if stage.index != x:
            yield f"{place}.index", f"is {stage.index}, in place {x}"
        if stage.rank >= ranks:
            yield f"{place}.rank", f"is {stage.rank}, there are {ranks} ranks"
        if len(own) < len(stage.ops):
            yield f"{place}.ops", "has an op twice"
        if strange := {*stage.clones, *again} - own:
            yield place, f"has {min(strange)!r} among clones or recomputed, which is none of its ops"
        if twice := [op for op in stage.ops if len(plan.stages_of[op]) > 1 and op not in stage.clones]:
            yield f"{place}.ops", f"has {twice[0]!r}, as another stage has, and it is no clone"
        if not all(stage.recomputed) or len({*again}) < len(again):
            yield f"{place}.recomputed", "has a block without ops, or an op twice"
        if stage.recompute and again:
            yield (
                f"{place}.recompute",
                "is True, and recomputed has blocks; either all runs again, or these do",
            )
        if stage.held_bytes > stage.saved_bytes:
            yield f"{place}.held_bytes", f"is {stage.held_bytes} of {stage.saved_bytes} saved_bytes"
        if stage.in_flight > max(1, plan.n_microbatches):
            yield f"{place}.in_flight", f"is {stage.in_flight}, of {plan.n_microbatches} microbatches"
    if idle := [rank for rank in range(min(ranks, n + 1)) if rank not in plan.placement]:
        yield "stages", f"has none on rank {idle[0]}; each of the cluster's ranks holds at least one"


def _faults_of_bounds(plan: Plan) -> Iterator[tuple[str, str]]:
    least, most = plan.bounds.bottleneck_lower_s, plan.bounds.bottleneck_s
    if least > most or (plan.bounds.proved and least < most):
        words = "proved" if plan.bounds.proved else "not proved"
        yield "bounds", f"has a bottleneck of {most} s, {words}, and {least} s as the least"
    if plan.bounds.step_lower_s > plan.step_s:
        yield "bounds.step_lower_s", f"is {plan.bounds.step_lower_s} s, and the plan's step {plan.step_s} s"
    if plan.n_candidates < len(plan.candidates):
        yield "n_candidates", f"is {plan.n_candidates}, and candidates has {len(plan.candidates)}"


def _faults_between(plan: Plan) -> Iterator[tuple[str, str]]:
    """Of what crosses between stages, and of ties."""
    n, names = plan.n_stages, {"boundaries": [b.value for b in plan.boundaries]}
    for what, listed in {**names, "ties": [t.parameter for t in plan.ties]}.items():
        if twice := sorted({name for name in listed if listed.count(name) > 1}):
            yield what, f"has {twice[0]!r} twice"
    for x, b in enumerate(plan.boundaries):
        if len({*b.destinations}) < len(b.destinations):
            yield f"boundaries[{x}].destinations", f"is {b.destinations}, a stage of which is there twice"
        if not b.destinations or not all(b.source < d < n for d in b.destinations):
            yield f"boundaries[{x}]", f"goes from stage {b.source} to {b.destinations}, of {n} stages"
        elif b.value not in plan.stages[b.source].ops:
            yield f"boundaries[{x}].value", f"is {b.value!r}, which stage {b.source} does not compute"
    for x, tie in enumerate(plan.ties):
        if not tie.stages or max(tie.stages) >= n or len(set(tie.stages)) < len(tie.stages):
            yield f"ties[{x}].stages", f"is {tie.stages}, of {n} stages"
        elif tie.mode == "colocate" and len({plan.placement[s] for s in tie.stages}) > 1:
            yield f"ties[{x}].mode", f"is 'colocate', and its stages {tie.stages} are on several ranks"
        if tie.parameter not in tie.names or len({*tie.names}) < len(tie.names):
            yield f"ties[{x}].names", f"is {tie.names}, of {tie.parameter!r}"


def _faults_of_settings(plan: Plan) -> Iterator[tuple[str, str]]:
    n, ranks, given = plan.n_stages, plan.n_ranks, plan.settings
    limits = given.get("memory_limit")
    each = limits if isinstance(limits, (list, tuple)) else [limits] * ranks
    if len(each) != ranks:
        yield "settings.memory_limit", f"has {len(each)} entries for {ranks} ranks; give one, or one per rank"
    try:
        for limit in each:
            if limit is not None:
                parse_bytes(limit)
    except InputError as error:
        yield "settings.memory_limit", f"cannot be: {error}"
    for name, stage in given.get("pin", {}).items():
        if not -n <= stage < n:
            yield f"settings.pin[{name!r}]", f"is stage {stage}, of {n} stages"
    chosen = given.get("ranks")
    if chosen is not None and (len(chosen) != ranks or len({*chosen}) < ranks):
        yield "settings.ranks", f"is {chosen}; it names a rank for each of {ranks}, once"
