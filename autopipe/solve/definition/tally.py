"""What a stage adds up to, and the ways in which the stages of a rank may compute parts again.

What that costs is said by ``problem``; the cheapest blocks of one stage are left to ``blocks``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from .blocks import Block
from .copies import Moved
from .pieces import Item, Share, Stage, both

__all__ = ["Again", "Tally", "by_worth", "whole_choices"]

_MANY_STAGES = 6
"""A rank with more stages recomputes in all of them or none."""


class Tally:
    """Sums over the items and shares of one stage, and over the values that it sends, receives and makes."""

    __slots__ = (
        "again_ns",
        "backward_ns",
        "blocks",
        "extra_bytes",
        "forward_ns",
        "host_ns",
        "receive_ns",
        "received_bytes",
        "saved_bytes",
        "send_ns",
        "sent_bytes",
        "static_bytes",
        "sync_ns",
        "wire_ns",
        "workspace_bytes",
    )

    def __init__(self) -> None:
        self.forward_ns = self.backward_ns = self.again_ns = 0
        self.send_ns = self.receive_ns = self.sync_ns = 0
        self.static_bytes = self.saved_bytes = self.workspace_bytes = 0
        self.received_bytes = self.sent_bytes = self.extra_bytes = self.wire_ns = 0
        self.blocks: tuple[Block, ...] = ()
        self.host_ns = 0, 0

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
        out = Tally()
        for name in Tally.__slots__:
            setattr(out, name, getattr(self, name))
        out.again_ns += row.again_ns
        out.send_ns += row.send_ns
        out.receive_ns += row.receive_ns
        out.wire_ns += row.wire_ns
        out.received_bytes += row.received_bytes
        out.sent_bytes += row.sent_bytes
        out.workspace_bytes = max(out.workspace_bytes, row.workspace_bytes)
        return out

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
