"""What a solver knows of a problem's optimum: an assignment and a bound.

What an assignment costs is said by ``problem``.
"""

from __future__ import annotations

import dataclasses

__all__ = ["Answer", "OutOfTime"]


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The best assignment known, its bottleneck, and a bottleneck that no assignment beats."""

    stage_of: tuple[int, ...] | None
    bottleneck_ns: int
    lower_ns: int

    @property
    def proved(self) -> bool:
        return self.bottleneck_ns <= self.lower_ns


class OutOfTime(Exception):
    """The deadline passed."""
