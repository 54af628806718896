"""The plan itself, and its JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..arguments import brief
from ..costs import Degrees
from ..errors import InputError, PlanError
from ..files import write_text
from ..hardware import Cluster
from ..presets import ADAM
from ..schema import Count, Index, Name, Seconds, build, differs, load, parse, refuse, versioned, written
from ..shown import Shown
from .diff import PlanDiff, compare
from .faults import faults
from .parts import Boundary, Bounds, Candidate, StagePlan, Tie
from .settings import Settings

__all__ = ["Plan", "check_plan"]

VERSION = 2


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

    @property
    def step_gap(self) -> float:
        """How far above its lower bound the predicted step may be, relative; infinite without a bound."""
        least_s = self.bounds.step_lower_s
        return self.step_s / least_s - 1 if least_s > 0 else math.inf

    @functools.cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return tuple(s.rank for s in self.stages)

    @functools.cached_property
    def loads_s(self) -> tuple[float, ...]:
        """By rank, seconds of forward and backward of one microbatch through its stages."""
        loads = [0.0] * self.n_ranks
        for stage in self.stages:
            loads[stage.rank] += stage.seconds
        return tuple(loads)

    @functools.cached_property
    def handed(self) -> tuple[tuple[int, int, Boundary], ...]:
        """(from stage, to stage, what crosses), a row for each stage that takes a value of another.

        A value goes to each other rank once, to the first of the rank's stages that needs it, which hands it
        on to the others.
        """
        rows = []
        for b in self.boundaries:
            holder = {self.placement[b.source]: b.source}
            for d in sorted(b.destinations):
                source = holder.setdefault(self.placement[d], d)
                rows.append((b.source if source == d else source, d, b))
        return tuple(rows)

    @property
    def optimizer_ratio(self) -> float:
        """Optimizer bytes per byte of trained parameter, from the settings or Adam's."""
        return float(self.settings.get("optimizer_bytes_per_parameter_byte", ADAM))

    @property
    def held_ratio(self) -> float:
        """Bytes of weight, gradient and optimizer state per byte of a tied parameter.

        1 where the stages have no gradients, as of a plan that trains nothing.
        """
        return 2 + self.optimizer_ratio if any(s.gradient_bytes for s in self.stages) else 1.0

    def repeated_bytes(self, placement: Sequence[int] | None = None) -> tuple[int, ...]:
        """Per rank, the weight bytes of tied parameters that its stages count after the first with each.

        ``placement`` is the rank of each stage, by default the plan's.
        """
        placed, out = self.placement if placement is None else placement, [0] * self.n_ranks
        for tie in self.ties:
            holders = [placed[s] for s in tie.stages]
            for rank in set(holders):
                out[rank] += (holders.count(rank) - 1) * tie.n_bytes
        return tuple(out)

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
        return compare(self, other)

    def to_json(self, path: str | pathlib.Path | None = None) -> str:
        """The plan as JSON text, also written to ``path`` when given."""
        text = written(_to_dict(self), indent=1)
        if path is not None:
            write_text(path, text)
        return text

    @classmethod
    def from_json(cls, source: str | pathlib.Path) -> Plan:
        """A plan from JSON text or the path of a file that holds it.

        Raises :class:`StoreError` when it is damaged or of another version, with the path to what does not
        fit. Nothing in a plan is ever run.
        """
        if isinstance(source, str) and source.lstrip()[:1] == "{":
            return _from_dict(parse(source, "the plan"), "the plan")
        return _from_dict(load(source, "the plan"), f"the plan {source}")


def check_plan(plan: Any) -> None:
    """Raise :class:`InputError` for what is no plan, :class:`PlanError` for one that contradicts itself.

    As one does that was edited by hand. Linear in its ops.
    """
    _check_kind("plan", plan)
    for path, fault in faults(plan):
        raise PlanError(f"the plan contradicts itself: its {path} {fault}; plan again, or change both")


def _check_kind(name: str, value: Any) -> None:
    if not isinstance(value, Plan):
        raise InputError(f"{name} is {brief(value)}; it must be a Plan: Plan.from_json reads one from a file")


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


def _from_dict(data: dict[str, Any], what: str) -> Plan:
    read = build(_PlanFile, versioned(data, VERSION, what, "plan"), what)
    build(Settings, read.settings, f"{what}, settings:")
    if unknown := sorted({*read.settings} - {*Settings.__annotations__}):
        raise refuse(what, f"settings[{unknown[0]!r}]", "is no setting of a plan")
    cluster = Cluster.from_dict(read.cluster, f"{what}, cluster:")
    fields = {f.name: getattr(read, f.name) for f in dataclasses.fields(Plan)}
    plan = Plan(**{**fields, "cluster": cluster})
    differs(data, json.loads(plan.to_json()), what)
    for path, fault in faults(plan):
        raise refuse(what, path, fault)
    return plan
