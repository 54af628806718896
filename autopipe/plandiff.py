"""What differs between two plans.

Plans and the figures they are compared by are left to ``plans``, showing differences to ``look``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .shown import Shown

__all__ = ["Change", "PlanDiff", "changed"]

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
        differs = any(a != b for _, a, b, _ in self.figures) or self.schedule[0] != self.schedule[1]
        return not (differs or self.moved or self.crossing or self.ties)

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


def changed(
    before: Mapping[str, tuple[Any, ...]], after: Mapping[str, tuple[Any, ...]]
) -> tuple[Change, ...]:
    """The names whose entries are not the same."""
    names = dict.fromkeys([*before, *after])
    pairs = ((name, before.get(name, ()), after.get(name, ())) for name in names)
    return tuple((name, a, b) for name, a, b in pairs if a != b)
