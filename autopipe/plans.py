"""The plan: which stage and rank computes what, what crosses, what is tied, and what it should cost.

Making plans is left to ``solve``, building modules from them to ``stages``. Readable without torch or the
model.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

from .errors import StoreError
from .hardware import Cluster
from .shown import Shown

__all__ = ["Boundary", "Bounds", "Candidate", "Plan", "PlanDiff", "StagePlan", "Tie"]

VERSION = 1


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
    workspace_bytes: peak above the rest while an action runs.
    in_flight: most microbatches alive at once under the plan's schedule.
    memory_bytes: predicted peak: weights, gradients, optimizer state, in flight × saved, workspace, buffers.
    """

    index: int
    rank: int
    ops: tuple[str, ...]
    clones: tuple[str, ...] = ()
    recompute: bool = False
    forward_s: float = 0.0
    backward_s: float = 0.0
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    saved_bytes: int = 0
    workspace_bytes: int = 0
    in_flight: int = 1
    memory_bytes: int = 0
    recomputed: tuple[tuple[str, ...], ...] = ()
    held_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Forward and backward of one microbatch."""
        return self.forward_s + self.backward_s


@dataclasses.dataclass(frozen=True, slots=True)
class Boundary:
    """A value that crosses from the stage that computes it to later stages that use it.

    ``n_bytes`` is per microbatch and direction; ``differentiable`` values send a gradient back.
    """

    value: str
    source: int
    destinations: tuple[int, ...]
    n_bytes: int
    differentiable: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Tie:
    """A parameter that several stages use: its gradients are summed once per step.

    ``mode`` is ``sync`` (a copy in each stage, an all-reduce of ``n_bytes`` costing ``seconds`` per step)
    or ``colocate`` (all users in one stage, or stages of one rank; no traffic).
    """

    parameter: str
    names: tuple[str, ...]
    stages: tuple[int, ...]
    n_bytes: int
    mode: Literal["sync", "colocate"] = "sync"
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """What no plan can beat, in the cost model the plan was solved in.

    ``bottleneck_s`` is the plan's largest stage load per microbatch (compute + exposed communication) and
    ``bottleneck_lower_s`` a certified lower bound on it; ``step_lower_s`` bounds the step time. ``proved``
    says that the bottleneck bound is met.
    """

    bottleneck_s: float
    bottleneck_lower_s: float
    step_lower_s: float
    proved: bool

    @property
    def gap(self) -> float:
        """How far above the lower bound the bottleneck may be, relative; 0 when proved."""
        if self.proved or self.bottleneck_lower_s <= 0:
            return 0.0
        return self.bottleneck_s / self.bottleneck_lower_s - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One alternative the solver simulated: what it was, its step time and the memory of its fullest rank."""

    label: str
    schedule: str
    n_stages: int
    n_microbatches: int
    step_s: float
    memory_bytes: int
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
    bounds: certificate of how far from optimal the cut can be.
    cluster: the ranks it was made for.
    candidates: what else was simulated, the uniform and by-parameters splits among them, best first. Of
        other schedules and counts of stages or microbatches only the best of each is kept.
    n_candidates: how many were simulated in all.
    settings: how it was asked for: balance, ties, pins, memory limit, optimizer, cost source, dims, versions.
    """

    model: str
    graph_digest: str
    stages: tuple[StagePlan, ...]
    boundaries: tuple[Boundary, ...]
    ties: tuple[Tie, ...]
    schedule: str
    n_microbatches: int
    step_s: float
    bounds: Bounds
    cluster: Cluster
    candidates: tuple[Candidate, ...] = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    n_candidates: int = 0

    @property
    def n_stages(self) -> int:
        return len(self.stages)

    @property
    def n_ranks(self) -> int:
        return self.cluster.n_ranks

    @property
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
        """What is different in ``other``. Linear in the ops of both."""
        rows = zip(_figures(self), _figures(other), strict=True)
        return PlanDiff(
            figures=tuple((what, a, b, unit) for (what, a, unit), (_, b, _) in rows),
            schedule=(self.schedule, other.schedule),
            moved=_changed(self.stages_of, other.stages_of),
            crossing=_changed(
                {b.value: (b.source, *b.destinations) for b in self.boundaries},
                {b.value: (b.source, *b.destinations) for b in other.boundaries},
            ),
            ties=_changed(
                {t.parameter: (t.mode, *t.stages) for t in self.ties},
                {t.parameter: (t.mode, *t.stages) for t in other.ties},
            ),
        )

    def to_json(self, path: str | pathlib.Path | None = None) -> str:
        """The plan as JSON text, also written to ``path`` when given."""
        text = json.dumps(_to_dict(self), indent=1)
        if path is not None:
            pathlib.Path(path).write_text(text)
        return text

    @classmethod
    def from_json(cls, source: str | pathlib.Path) -> Plan:
        """A plan from JSON text or the path of a file that holds it.

        Raises :class:`StoreError` when it is damaged or of another version.
        """
        text = str(source)
        where = "plan"
        if not text.lstrip().startswith("{"):
            where = text
            try:
                text = pathlib.Path(source).read_text()
            except OSError as error:
                raise StoreError(f"cannot read a plan from {where}: {error}") from error
        try:
            return _from_dict(json.loads(text), where)
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{where} is damaged: {error!r}; make the plan again") from error


Change = tuple[str, tuple[Any, ...], tuple[Any, ...]]
"""A name with what it was and what it is; () where it was not, or is no more."""


@dataclasses.dataclass(frozen=True)
class PlanDiff(Shown):
    """What changed from one plan to another.

    Attributes
    ----------
    figures: (what, before, after, unit) with unit ``s``, ``bytes``, ``share`` or "" for counts.
    schedule: before and after.
    moved: ops with the stages that compute them.
    crossing: values with the stage that sends them and those that take them.
    ties: shared parameters with their mode and stages.
    """

    figures: tuple[tuple[str, float, float, str], ...]
    schedule: tuple[str, str]
    moved: tuple[Change, ...]
    crossing: tuple[Change, ...]
    ties: tuple[Change, ...]

    @property
    def is_empty(self) -> bool:
        """Whether nothing changed."""
        changed = any(a != b for _, a, b, _ in self.figures) or self.schedule[0] != self.schedule[1]
        return not (changed or self.moved or self.crossing or self.ties)

    def worse(self, threshold: float = 0.0) -> tuple[str, ...]:
        """Step time and the fullest rank's memory, where they grow by more than a fraction ``threshold``."""
        judged = {"step", "fullest rank"}
        return tuple(w for w, a, b, _ in self.figures if w in judged and b > a * (1 + threshold))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        out: dict[str, Any] = {
            "figures": [{"what": w, "before": a, "after": b} for w, a, b, _ in self.figures],
            "schedule": list(self.schedule),
        }
        for name, key in (("moved", "op"), ("crossing", "value"), ("ties", "parameter")):
            rows: tuple[Change, ...] = getattr(self, name)
            out[name] = [{key: what, "before": list(a), "after": list(b)} for what, a, b in rows]
        return out


def _figures(plan: Plan) -> tuple[tuple[str, float, str], ...]:
    held = [0] * plan.n_ranks
    for stage in plan.stages:
        held[stage.rank] += stage.memory_bytes
    return (
        ("step", plan.step_s, "s"),
        ("slowest stage", plan.bounds.bottleneck_s, "s"),
        ("fullest rank", max(held, default=0), "bytes"),
        (
            "sent forward per microbatch",
            sum(b.n_bytes * len(b.destinations) for b in plan.boundaries),
            "bytes",
        ),
        ("stages", plan.n_stages, ""),
        ("ranks", plan.n_ranks, ""),
        ("microbatches", plan.n_microbatches, ""),
        ("gap to optimum", plan.bounds.gap, "share"),
    )


def _changed(
    before: Mapping[str, tuple[Any, ...]], after: Mapping[str, tuple[Any, ...]]
) -> tuple[Change, ...]:
    names = dict.fromkeys([*before, *after])
    pairs = ((name, before.get(name, ()), after.get(name, ())) for name in names)
    return tuple((name, a, b) for name, a, b in pairs if a != b)


def _to_dict(plan: Plan) -> dict[str, Any]:
    out = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    for name in ("stages", "boundaries", "ties", "candidates"):
        out[name] = [dataclasses.asdict(item) for item in out[name]]
    out |= {"bounds": dataclasses.asdict(plan.bounds), "cluster": plan.cluster.to_dict()}
    return {"version": VERSION, **out, "settings": dict(plan.settings)}


def _from_dict(data: dict[str, Any], where: str) -> Plan:
    if data.pop("version", None) != VERSION:
        raise StoreError(f"{where} is not a plan of version {VERSION}; make the plan again")
    rows = {"stages": StagePlan, "boundaries": Boundary, "ties": Tie, "candidates": Candidate}
    for name, cls in rows.items():
        data[name] = tuple(cls(**{k: _tuples(v) for k, v in row.items()}) for row in data[name])
    return Plan(**{**data, "bounds": Bounds(**data["bounds"]), "cluster": Cluster.from_dict(data["cluster"])})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
