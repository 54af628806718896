"""What differs between two plans, and the figures they are compared by; showing it is left to ``look``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..schedule import build
from ..shown import Shown

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["PlanDiff", "compare", "rank_bytes"]

Change = tuple[str, tuple[Any, ...], tuple[Any, ...]]
"""A name with what it was and what it is; () where it was not, or is no more."""


@dataclasses.dataclass(frozen=True)
class PlanDiff(Shown):
    """What changed from one plan to another.

    Attributes
    ----------
    figures: (what, before, after, unit) with unit ``s``, ``bytes``, ``share`` or "" for counts.
    model, schedule: before and after.
    moved: ops with the stages that compute them.
    crossing: values with the stage that sends them and those that take them.
    ties: shared parameters with their mode and stages.
    asked: settings that a plan is asked for by, the ranks of its stages and what these compute on.
    """

    figures: tuple[tuple[str, float, float, str], ...]
    model: tuple[str, str]
    schedule: tuple[str, str]
    moved: tuple[Change, ...]
    crossing: tuple[Change, ...]
    ties: tuple[Change, ...]
    asked: tuple[Change, ...]

    @property
    def is_empty(self) -> bool:
        """Whether nothing changed."""
        pairs = self.model, self.schedule, *((a, b) for _, a, b, _ in self.figures)
        differs = any(a != b for a, b in pairs)
        return not (differs or self.moved or self.crossing or self.ties or self.asked)

    def worse(self, threshold: float = 0.0) -> tuple[str, ...]:
        """Step time and the fullest rank's memory, where they grow by more than a fraction ``threshold``."""
        judged = {"step", "fullest rank"}
        return tuple(w for w, a, b, _ in self.figures if w in judged and b > a * (1 + threshold))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        out: dict[str, Any] = {
            "figures": [{"what": w, "before": a, "after": b} for w, a, b, _ in self.figures],
            "model": list(self.model),
            "schedule": list(self.schedule),
        }
        keys = {"moved": "op", "crossing": "value", "ties": "parameter", "asked": "setting"}
        for name, key in keys.items():
            rows: tuple[Change, ...] = getattr(self, name)
            out[name] = [{key: what, "before": list(a), "after": list(b)} for what, a, b in rows]
        return out


def compare(plan: Plan, other: Plan) -> PlanDiff:
    """What is different in ``other``. Linear in the ops of both."""
    rows = zip(_figures(plan), _figures(other), strict=True)
    return PlanDiff(
        figures=tuple((what, a, b, unit) for (what, a, unit), (_, b, _) in rows),
        model=(plan.model, other.model),
        schedule=(plan.schedule, other.schedule),
        moved=_changed(plan.stages_of, other.stages_of),
        crossing=_changed(
            {b.value: (b.source, *b.destinations) for b in plan.boundaries},
            {b.value: (b.source, *b.destinations) for b in other.boundaries},
        ),
        ties=_changed(
            {t.parameter: (t.mode, *t.stages) for t in plan.ties},
            {t.parameter: (t.mode, *t.stages) for t in other.ties},
        ),
        asked=_changed(_asked(plan), _asked(other)),
    )


_ASKED = (
    "balance", "ties", "pin", "together", "uncut", "clone", "sender_pays", "device_order", "recompute",
    "overlap", "loss_on", "memory_limit", "optimizer_bytes_per_parameter_byte", "precision", "optimizer",
    "offload",
)  # fmt: skip
"""The settings that say what was asked for, and not what came of it or of which costs."""


def _asked(plan: Plan) -> dict[str, tuple[Any, ...]]:
    """What a plan was asked for by, in values that compare as its file has them."""
    found = {name: plan.settings[name] for name in _ASKED if plan.settings.get(name) not in (None, [], {})}
    placed = {"ranks of stages": plan.placement, "devices": tuple(d.name for d in plan.cluster.devices)}
    return {**{name: _row(value) for name, value in found.items()}, **placed}


def _row(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Mapping):
        return tuple(f"{name}={item}" for name, item in sorted(value.items()))
    return tuple(map(str, value)) if isinstance(value, (list, tuple)) else (value,)


def _changed(
    before: Mapping[str, tuple[Any, ...]], after: Mapping[str, tuple[Any, ...]]
) -> tuple[Change, ...]:
    """The names whose entries are not the same."""
    names = dict.fromkeys([*before, *after])
    pairs = ((name, before.get(name, ()), after.get(name, ())) for name in names)
    return tuple((name, a, b) for name, a, b in pairs if a != b)


def _figures(plan: Plan) -> tuple[tuple[str, float, str], ...]:
    """What plans are compared by: (what, value, unit)."""
    return (
        ("step", plan.step_s, "s"),
        ("slowest stage", plan.bounds.bottleneck_s, "s"),
        ("fullest rank", max(rank_bytes(plan, rank) for rank in range(plan.n_ranks)), "bytes"),
        (
            "sent forward per microbatch",
            sum(b.n_bytes for s, d, b in plan.handed if plan.placement[s] != plan.placement[d]),
            "bytes",
        ),
        ("stages", plan.n_stages, ""),
        ("ranks", plan.n_ranks, ""),
        ("microbatches", plan.n_microbatches, ""),
        ("gap of the step", plan.step_gap, "share"),
        ("gap of the bottleneck", plan.bounds.gap, "share"),
    )


def rank_bytes(plan: Plan, rank: int) -> int:
    """A rank's peak: what stays of its stages, tied copies once, and the fullest moment of its schedule."""
    own = [s for s in plan.stages if s.rank == rank]
    if len(own) < 2:
        return sum(s.memory_bytes for s in own)
    still = sum(s.memory_bytes - s.in_flight * s.saved_bytes - s.workspace_bytes for s in own)
    still -= round(plan.repeated_bytes()[rank] * plan.held_ratio)
    schedule = build(
        plan.schedule, plan.n_ranks, plan.n_stages, plan.n_microbatches, placement=plan.placement
    )
    return still + max(
        sum(n * s.saved_bytes for n, s in zip(alive, own, strict=True)) + own[x].workspace_bytes
        for alive, x in schedule.moments[rank]
    )
