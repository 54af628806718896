"""The two types every schedule is made of. Generating schedules is left to ``templates``."""

from __future__ import annotations

import dataclasses
from typing import Literal

__all__ = ["Action", "Kind", "Schedule"]

Kind = Literal["F", "B", "I", "W"]


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Action:
    """One thing a rank does: forward (F), full backward (B), or its input (I) or weight (W) part.

    >>> str(Action(2, "F", 0))
    '2F0'
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """For each rank, its actions in order.

    Attributes
    ----------
    name: such as ``"1f1b"``.
    placement: the rank of each stage; ``len(placement)`` is the number of stages.
    n_microbatches: how many microbatches the step has, at least 1.
    actions: per rank, its actions in order.
    """

    name: str
    placement: tuple[int, ...]
    n_microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def n_stages(self) -> int:
        return len(self.placement)

    @property
    def n_ranks(self) -> int:
        return len(self.actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages a rank holds, in order."""
        return tuple(s for s, r in enumerate(self.placement) if r == rank)

    def __str__(self) -> str:
        return "\n".join(f"rank {r}: " + " ".join(map(str, row)) for r, row in enumerate(self.actions))
