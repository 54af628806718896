"""What a partitioning problem is made of, in plain integers: items, values, shares, stages and their loads.

What an assignment of items to stages costs is said by ``problem``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from .blocks import Block, freed_bytes, redone_bytes

__all__ = [
    "HUGE",
    "Array",
    "Item",
    "Net",
    "Share",
    "Stage",
    "StageLoad",
    "both",
    "memory_bytes",
    "most_work",
    "scaled",
    "stage_ns",
]

Array = npt.NDArray[np.int64]

HUGE = 1 << 60
"""More than any load or size; what an impossible stage costs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """Ops that stay together. ``first`` to ``last`` are the stages it may be in (last −1: to the end).

    ``blocks`` are those of its ops that may be computed again in backward, apart from the rest of a stage.
    ``host_ns`` is what the host takes to launch its forward and backward, where the device goes on meanwhile.
    """

    ops: tuple[str, ...] = ()
    forward_ns: int = 0
    backward_ns: int = 0
    static_bytes: int = 0
    saved_bytes: int = 0
    workspace_bytes: int = 0
    first: int = 0
    last: int = -1
    blocks: tuple[Block, ...] = ()
    host_ns: tuple[int, int] = (0, 0)

    @property
    def work_ns(self) -> int:
        return self.forward_ns + self.backward_ns


@dataclasses.dataclass(frozen=True, slots=True)
class Net:
    """A value, the item that makes it and those that take it; sending and receiving it have a price.

    ``n_bytes`` is what a stage that recomputes keeps of it, and what each of a receiver's two buffers for it
    takes; ``sent_bytes`` is its sender's buffer, for the gradient that comes back. A stage may compute it
    again instead of receiving it where ``again_ns`` is not negative, which then is that work, and
    ``again_bytes`` its workspace; either way each microbatch in flight keeps ``kept_bytes`` of it, once made
    there in no buffer but its own. ``link_ns`` are its prices by kind of link, where stages have unlike ones;
    its own are then the least.
    """

    producer: int
    consumers: tuple[int, ...]
    send_ns: int = 0
    receive_ns: int = 0
    value: str = ""
    n_bytes: int = 0
    sent_bytes: int = 0
    again_ns: int = -1
    again_bytes: int = 0
    kept_bytes: int = 0
    link_ns: tuple[tuple[int, int], ...] = ()

    @property
    def has_bytes(self) -> bool:
        """Whether any stage holds something on its account."""
        return bool(self.n_bytes or self.sent_bytes or self.again_bytes or self.kept_bytes)

    def without_bytes(self) -> Net:
        """The same where stages hold nothing on its account."""
        return dataclasses.replace(self, n_bytes=0, sent_bytes=0, again_bytes=0, kept_bytes=0)

    def prices_ns(self, links: tuple[int, int]) -> tuple[int, int]:
        """What a stage pays to send it, and to receive it, over the links it has for either."""
        if not self.link_ns:
            return self.send_ns, self.receive_ns
        return self.link_ns[links[0]][0], self.link_ns[links[1]][1]


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """What every stage that holds one of ``items`` must hold too: a parameter, or an op computed again.

    Where two ranks hold it, the first stage of each pays ``sync_ns`` per microbatch; where three or more do,
    the entries of ``more_ns`` in turn (none: the same). Where links are unlike, these are the least, and
    ``link_ns`` has for each number of ranks from two on the price over each kind of link.
    ``tied``: stages of one rank hold one copy. ``host_ns`` as in :class:`Item`.
    """

    items: tuple[int, ...]
    name: str = ""
    forward_ns: int = 0
    backward_ns: int = 0
    static_bytes: int = 0
    saved_bytes: int = 0
    workspace_bytes: int = 0
    sync_ns: int = 0
    more_ns: tuple[int, ...] = ()
    tied: bool = False
    host_ns: tuple[int, int] = (0, 0)
    link_ns: tuple[tuple[int, ...], ...] = ()

    def price_ns(self, n_ranks: int, kinds: Collection[int] = ()) -> int:
        """What each stage pays where so many ranks hold it, over the slowest of these kinds of links."""
        if n_ranks > 1 and self.link_ns and kinds:
            row = self.link_ns[min(n_ranks - 2, len(self.link_ns) - 1)]
            return max(row[kind] for kind in kinds)
        if n_ranks < 3 or not self.more_ns:
            return self.sync_ns if n_ranks > 1 else 0
        return self.more_ns[min(n_ranks - 3, len(self.more_ns) - 1)]


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """Where one stage runs: its rank, that rank's speed and memory, and its microbatches in flight.

    ``links`` are the kinds of the link it sends over and of the one it receives over (``Net.link_ns``).
    ``nic`` is the network interface over which it reaches ranks of another ``host``, where it shares that
    with other ranks; −1 where it has its own.
    """

    rank: int
    speed: float = 1.0
    limit_bytes: int = HUGE
    in_flight: int = 1
    links: tuple[int, int] = (0, 0)
    host: int = 0
    nic: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class StageLoad:
    """What one stage costs per microbatch, in the problem's integers.

    ``extra_bytes`` of ``static_bytes`` are tied copies that an earlier stage of its rank holds already.
    ``recompute`` says that all of it is computed again in backward, ``blocks`` what of it otherwise;
    ``copies`` are the values that it computes instead of receiving them. By at most ``open_ns`` the best
    choice of both may be cheaper, where the search for it was cut off. ``wire_ns`` is for how long its
    messages hold the network interface that it shares.
    """

    forward_ns: int
    backward_ns: int
    send_ns: int
    receive_ns: int
    sync_ns: int
    static_bytes: int
    saved_bytes: int
    workspace_bytes: int
    received_bytes: int
    memory_bytes: int
    recompute: bool
    extra_bytes: int
    load_ns: int
    blocks: tuple[Block, ...] = ()
    copies: tuple[str, ...] = ()
    open_ns: int = 0
    wire_ns: int = 0

    @property
    def kept_bytes(self) -> int:
        """What each microbatch in flight keeps."""
        return self.received_bytes if self.recompute else self.saved_bytes - freed_bytes(self.blocks)

    @property
    def acting_bytes(self) -> int:
        """Peak above the rest while an action runs."""
        return self.workspace_bytes + (self.saved_bytes if self.recompute else redone_bytes(self.blocks))


@overload
def scaled(ns: int, speed: float) -> int: ...
@overload
def scaled(ns: Array, speed: float) -> Array: ...
def scaled(ns: int | Array, speed: float) -> int | Array:
    """A stage's work on a device of another speed, rounded to even halves; of one or an array of them."""
    if speed == 1.0:
        return ns
    return np.rint(ns / speed).astype(np.int64) if isinstance(ns, np.ndarray) else round(ns / speed)


def stage_ns(work: Any, moving: Any, sync: Any, overlap: bool) -> Any:
    """A stage's load from its work, what it sends and receives, and what it synchronises; ints or arrays.

    Synchronising waits for the last backward, so nothing hides it.
    """
    if not overlap:
        return work + moving + sync
    return (max(work, moving) if isinstance(work, int) else np.maximum(work, moving)) + sync


def both(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """A forward and a backward beside others."""
    return a[0] + b[0], a[1] + b[1]


def most_work(limit: int, speed: float) -> int:
    """The most that a stage's work can be where its time is at most ``limit``, rounding allowed for."""
    return limit if speed == 1.0 else math.floor(min((limit + 1) * speed, HUGE))


def memory_bytes(
    in_flight: Any, static: Any, saved: Any, workspace: Any, received: Any, sent: Any
) -> tuple[Any, Any]:
    """Bytes of a stage that keeps what it saved, and of one that recomputes it from what it received.

    Both hold buffers beside: the next microbatch's values, the last one's gradients, and gradients arriving.
    """
    still = static + workspace + 2 * received + sent
    return still + in_flight * saved, still + in_flight * received + saved
