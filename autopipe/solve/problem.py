"""The partitioning problem as plain integers, and what an assignment of items to stages costs in it.

Making a problem from an op graph is left to ``formulate``, merging items to ``contract``, answers to the
solvers. This module is the definition that every solver, bound and test is held against.

::

    minimise  max over stages s of  load(s)
    load(s) = work(s) + transfers(s)            nothing hidden
            = max(work(s), transfers(s))        overlap
    work(s)      = (forward + backward of its items and of the shares it touches) / speed(s)
                 + forward once more where the stage recomputes
    transfers(s) = what it sends and receives, once per value (or per receiver), + synchronising its shares
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

__all__ = [
    "HUGE",
    "Item",
    "Net",
    "Problem",
    "Share",
    "Stage",
    "StageLoad",
    "memory_bytes",
    "peak_bytes",
    "scaled",
]

HUGE = 1 << 60
"""More than any load or size; what an impossible stage costs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """Ops that stay together. ``first`` to ``last`` are the stages it may be in (last −1: to the end)."""

    ops: tuple[str, ...] = ()
    forward_ns: int = 0
    backward_ns: int = 0
    static_bytes: int = 0
    saved_bytes: int = 0
    workspace_bytes: int = 0
    first: int = 0
    last: int = -1

    @property
    def work_ns(self) -> int:
        return self.forward_ns + self.backward_ns


@dataclasses.dataclass(frozen=True, slots=True)
class Net:
    """A value, the item that makes it and those that take it; sending and receiving it have a price.

    ``n_bytes`` is what a stage that recomputes keeps of it.
    """

    producer: int
    consumers: tuple[int, ...]
    send_ns: int = 0
    receive_ns: int = 0
    value: str = ""
    n_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """What every stage that holds one of ``items`` must hold too: a parameter, or an op computed again.

    Where more than one rank holds it, each of their stages pays ``sync_ns`` per microbatch.
    """

    items: tuple[int, ...]
    name: str = ""
    forward_ns: int = 0
    backward_ns: int = 0
    static_bytes: int = 0
    saved_bytes: int = 0
    workspace_bytes: int = 0
    sync_ns: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """Where one stage runs: its rank, that rank's speed and memory, and its microbatches in flight."""

    rank: int
    speed: float = 1.0
    limit_bytes: int = HUGE
    in_flight: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class StageLoad:
    """What one stage costs per microbatch, in the problem's integers."""

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
    load_ns: int

    @property
    def transfers_ns(self) -> int:
        return self.send_ns + self.receive_ns + self.sync_ns


@dataclasses.dataclass(frozen=True)
class Problem:
    """Items in a topological order, what runs between them, and the stages to put them in.

    Attributes
    ----------
    edges: (earlier, later) item pairs with earlier < later; stages must not decrease along them.
    pair_ns: prices of each net by (sender's rank, receiver's rank), (send, receive) where links differ; the
        nets' own prices are then the cheapest pair's, so every bound holds.
    sender_pays: ``once`` per value, or per ``receiver`` stage.
    recompute: ``never``, ``auto`` (where a stage would not fit otherwise) or ``always``.
    allow_empty: stages may hold no item (the published model: fewer devices are allowed).
    """

    items: tuple[Item, ...]
    edges: tuple[tuple[int, int], ...]
    nets: tuple[Net, ...]
    shares: tuple[Share, ...]
    stages: tuple[Stage, ...]
    pair_ns: Mapping[tuple[int, int], tuple[tuple[int, int], ...]] | None = None
    sender_pays: str = "once"
    overlap: bool = False
    recompute: str = "never"
    allow_empty: bool = False

    @property
    def n_stages(self) -> int:
        return len(self.stages)

    @property
    def total_ns(self) -> int:
        """Work of all items, each once."""
        return sum(i.work_ns for i in self.items)

    @functools.cached_property
    def one_stage_per_rank(self) -> bool:
        return len({s.rank for s in self.stages}) == self.n_stages

    @functools.cached_property
    def is_separable(self) -> bool:
        """Whether a stage's load depends on its own items alone, as the exact method needs."""
        return self.one_stage_per_rank and self.pair_ns is None and self.sender_pays == "once"

    @functools.cached_property
    def nets_of(self) -> tuple[tuple[int, ...], ...]:
        """The nets each item makes or takes."""
        return _incidence(len(self.items), [(n.producer, *n.consumers) for n in self.nets])

    @functools.cached_property
    def shares_of(self) -> tuple[tuple[int, ...], ...]:
        """The shares each item touches."""
        return _incidence(len(self.items), [s.items for s in self.shares])

    @functools.cached_property
    def before(self) -> tuple[tuple[int, ...], ...]:
        """The items that must not come later than each item."""
        out: list[list[int]] = [[] for _ in self.items]
        for a, b in self.edges:
            out[b].append(a)
        return tuple(map(tuple, out))

    @functools.cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """The items that must not come earlier than each item."""
        out: list[list[int]] = [[] for _ in self.items]
        for a, b in self.edges:
            out[a].append(b)
        return tuple(map(tuple, out))

    def last_of(self, item: int) -> int:
        """The last stage an item may be in."""
        last = self.items[item].last
        return self.n_stages - 1 if last < 0 else last

    def is_valid(self, stage_of: Sequence[int]) -> bool:
        """Whether order, pins and the need for every stage to hold an item are met."""
        windows = all(i.first <= stage_of[v] <= self.last_of(v) for v, i in enumerate(self.items))
        order = all(stage_of[a] <= stage_of[b] for a, b in self.edges)
        used = {stage_of[v] for v, i in enumerate(self.items) if i.ops}
        return windows and order and (self.allow_empty or len(used) == self.n_stages)

    def loads(self, stage_of: Sequence[int]) -> tuple[StageLoad, ...]:
        """What each stage costs under an assignment, with the true prices of every transfer."""
        tallies = [_Tally() for _ in self.stages]
        for v, item in enumerate(self.items):
            tallies[stage_of[v]].add(item, self.stages[stage_of[v]].speed)
        for share in self.shares:
            touched = sorted({stage_of[v] for v in share.items})
            ranks = {self.stages[s].rank for s in touched}
            for s in touched:
                tallies[s].add(share, self.stages[s].speed)
                tallies[s].sync_ns += share.sync_ns if len(ranks) > 1 else 0
        for n, net in enumerate(self.nets):
            self._transfer(n, stage_of[net.producer], {stage_of[v] for v in net.consumers}, tallies)
        return tuple(self._finish(s, t) for s, t in enumerate(tallies))

    def _transfer(self, n: int, source: int, touched: set[int], tallies: list[_Tally]) -> None:
        net, here = self.nets[n], self.stages[source].rank
        sends = []
        for s in touched - {source}:
            there = self.stages[s].rank
            tallies[s].received_bytes += net.n_bytes
            if there == here:
                continue
            pair = self.pair_ns[here, there][n] if self.pair_ns else (net.send_ns, net.receive_ns)
            sends.append(pair[0])
            tallies[s].receive_ns += pair[1]
        if sends:
            tallies[source].send_ns += max(sends) if self.sender_pays == "once" else sum(sends)

    def _finish(self, s: int, t: _Tally) -> StageLoad:
        stage = self.stages[s]
        forward, backward = t.forward_ns, t.backward_ns
        kept, again = memory_bytes(stage, t.static_bytes, t.saved_bytes, t.workspace_bytes, t.received_bytes)
        recompute = self.recompute == "always" or (self.recompute == "auto" and kept > stage.limit_bytes)
        work = forward + backward + (forward if recompute else 0)
        transfers = t.send_ns + t.receive_ns + t.sync_ns
        return StageLoad(
            forward,
            backward + (forward if recompute else 0),
            t.send_ns,
            t.receive_ns,
            t.sync_ns,
            t.static_bytes,
            t.saved_bytes,
            t.workspace_bytes,
            t.received_bytes,
            again if recompute else kept,
            recompute,
            max(work, transfers) if self.overlap else work + transfers,
        )

    def bottleneck(self, loads: Sequence[StageLoad]) -> int:
        """The largest load of a rank: the sum over its stages; :data:`HUGE` or more where memory is short."""
        ranks: dict[int, int] = {}
        memory: dict[int, int] = {}
        for stage, load in zip(self.stages, loads, strict=True):
            ranks[stage.rank] = ranks.get(stage.rank, 0) + load.load_ns
            memory[stage.rank] = memory.get(stage.rank, 0) + load.memory_bytes
        short = sum(memory[s.rank] > s.limit_bytes for s in self.stages)
        return max(ranks.values()) + short * HUGE


class _Tally:
    """Sums over the items and shares of one stage."""

    __slots__ = (
        "backward_ns",
        "forward_ns",
        "receive_ns",
        "received_bytes",
        "saved_bytes",
        "send_ns",
        "static_bytes",
        "sync_ns",
        "workspace_bytes",
    )

    def __init__(self) -> None:
        self.forward_ns = self.backward_ns = self.send_ns = self.receive_ns = self.sync_ns = 0
        self.static_bytes = self.saved_bytes = self.workspace_bytes = self.received_bytes = 0

    def add(self, part: Item | Share, speed: float) -> None:
        self.forward_ns += scaled(part.forward_ns, speed)
        self.backward_ns += scaled(part.backward_ns, speed)
        self.static_bytes += part.static_bytes
        self.saved_bytes += part.saved_bytes
        self.workspace_bytes = max(self.workspace_bytes, part.workspace_bytes)


def scaled(ns: int, speed: float) -> int:
    """An item's work on a device of another speed."""
    return ns if speed == 1.0 else round(ns / speed)


def memory_bytes(stage: Stage, static: int, saved: int, workspace: int, received: int) -> tuple[int, int]:
    """Bytes of a stage that keeps what it saved, and of one that recomputes it from what it received."""
    kept = static + stage.in_flight * saved + workspace
    return kept, static + stage.in_flight * received + saved + workspace


def peak_bytes(problem: Problem, v: int) -> int:
    """Workspace of a stage that holds an item, as far as the item decides it."""
    shares = (problem.shares[s].workspace_bytes for s in problem.shares_of[v])
    return max(problem.items[v].workspace_bytes, *shares, 0)


def _incidence(n_items: int, rows: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    out: list[list[int]] = [[] for _ in range(n_items)]
    for r, row in enumerate(rows):
        for v in set(row):
            out[v].append(r)
    return tuple(map(tuple, out))
