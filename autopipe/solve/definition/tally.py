"""What a stage adds up to, and the ways in which the stages of a rank may compute parts again.

What that costs is said by ``problem``; the cheapest blocks of one stage are left to ``blocks``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from .blocks import Block
from .copies import Moved
from .pieces import Item, Share, Stage, both

__all__ = ["Again", "Tally", "by_worth", "whole_choices"]

_MANY_STAGES = 6
"""A rank with more stages recomputes in all of them or none."""


@dataclasses.dataclass(slots=True)
class Tally:
    """Sums over the items and shares of one stage, and over the values that it sends, receives and makes."""

    forward_ns: int = 0
    backward_ns: int = 0
    again_ns: int = 0
    send_ns: int = 0
    receive_ns: int = 0
    sync_ns: int = 0
    wire_ns: int = 0
    static_bytes: int = 0
    saved_bytes: int = 0
    workspace_bytes: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    extra_bytes: int = 0
    blocks: tuple[Block, ...] = ()
    host_ns: tuple[int, int] = (0, 0)

    def add(self, part: Item | Share) -> None:
        """Let the stage hold an item, or what several stages share."""
        if isinstance(part, Item):
            self.blocks += part.blocks
        self.forward_ns += part.forward_ns
        self.backward_ns += part.backward_ns
        if part.host_ns != (0, 0):
            self.host_ns = both(self.host_ns, part.host_ns)
        self.static_bytes += part.static_bytes
        self.saved_bytes += part.saved_bytes
        self.workspace_bytes = max(self.workspace_bytes, part.workspace_bytes)

    def moved(self, row: Moved) -> Tally:
        """With values computed again, sent and received beside."""
        if not any(row):
            return self
        sums: dict[str, Any] = {name: getattr(self, name) + more for name, more in row._asdict().items()}
        sums["workspace_bytes"] = max(self.workspace_bytes, row.workspace_bytes)
        return dataclasses.replace(self, **sums)

    @property
    def paces_ns(self) -> tuple[tuple[int, int], ...]:
        """Forward and backward as the device would take them, and the host: the slower of both counts."""
        device = self.forward_ns, self.backward_ns
        return (device,) if self.host_ns == (0, 0) else (device, self.host_ns)


Again = bool | tuple[Block, ...]
"""Whether a whole stage is computed again, or what of it."""


def whole_choices(n_stages: int) -> Iterator[tuple[bool, ...]]:
    """Which of a rank's stages may recompute as a whole: any, or of many stages none or all of them."""
    if n_stages > _MANY_STAGES:
        return iter([(False,) * n_stages, (True,) * n_stages])
    return itertools.product((False, True), repeat=n_stages)


def by_worth(stages: Sequence[Stage], tallies: Sequence[Tally]) -> Iterator[list[Again]]:
    """More and more blocks of a rank's stages, those first that take the least time per byte given up."""
    blocks = [(s, x, b) for s, t in enumerate(tallies) for x, b in enumerate(t.blocks)]
    blocks.sort(
        key=lambda row: (row[2].forward_ns / (row[2].freed_bytes * stages[row[0]].in_flight), *row[:2])
    )
    chosen: list[tuple[Block, ...]] = [()] * len(stages)
    for s, _, block in blocks:
        chosen[s] += (block,)
        yield list(chosen)
