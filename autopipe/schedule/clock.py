"""When each action of a schedule starts and ends, given times and transfers: one pass, no event queue.

A rank runs its actions in order and sends over a link in the order it runs them, so going through the
actions in any order that respects dependencies finds every time exactly, link contention included. Where
ranks share a network interface, they are gone through in the order in which they end. What the times mean for
a step is left to ``simulator``.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from ..hardware import Cluster
from .actions import F, Schedule, StageTimes, Transfer
from .gathers import gathers

__all__ = ["Clock", "Edges", "GatheredRow", "Gathering", "SentRow", "run", "wiring"]


SentRow = tuple[int, int, bool, int, float, float, int]
"""A message between ranks: its stages, from and to, is gradient, microbatch, start, end, bytes."""
GatheredRow = tuple[int, int, float, float]
"""A stage's weights made whole: rank, stage, start, end."""


@dataclasses.dataclass(frozen=True, slots=True)
class Edges:
    """Which stages wait for which: per stage, the bytes of its message to each other stage, both ways."""

    forward: tuple[Mapping[int, int], ...]
    backward: tuple[Mapping[int, int], ...]

    @classmethod
    def of(cls, schedule: Schedule, transfers: Iterable[Transfer] | None = None) -> Edges:
        """Transfers summed per pair of stages; for None, an empty message from each stage to the next."""
        n = schedule.n_stages
        forward: list[dict[int, int]] = [{} for _ in range(n)]
        backward: list[dict[int, int]] = [{} for _ in range(n)]
        if transfers is None:
            transfers = (Transfer(s, s + 1) for s in range(n - 1))
        for t in transfers:
            forward[t.source][t.destination] = forward[t.source].get(t.destination, 0) + t.n_bytes
            if t.differentiable:
                backward[t.destination][t.source] = backward[t.destination].get(t.source, 0) + t.n_bytes
        return cls(tuple(forward), tuple(backward))


@dataclasses.dataclass(slots=True)
class Clock:
    """The result of a run.

    ``starts_s`` and ``ends_s`` are per rank and aligned with the schedule's actions.
    """

    schedule: Schedule
    starts_s: list[list[float]]
    ends_s: list[list[float]]
    sent: list[SentRow]
    gathered: list[GatheredRow] = dataclasses.field(default_factory=list)

    def ends_in_order(self) -> list[float]:
        """Ends of the actions in the order of :attr:`Schedule.order`."""
        rows = [iter(row) for row in self.ends_s]
        return [next(rows[rank]) for rank, _, _ in self.schedule.order]


_Out = tuple[list[float], int, float, float, tuple[int, int, bool, int]]
"""(arrival times by microbatch, link or −1, seconds on the link, latency, labels)."""


class Gathering:
    """When stages are whole whose weights a rank gathers: ``seconds`` each, one after the other, beside work.

    At most ``most`` of a rank's are at a time, all of them for None.
    """

    def __init__(self, schedule: Schedule, seconds: Sequence[float], most: int | None = None) -> None:
        self._seconds = seconds
        sharded = tuple(s for s, gather_s in enumerate(seconds) if gather_s)
        self._before = [gathers(row, sharded, most) for row in schedule.actions] if sharded else []
        self._free_s = [0.0] * schedule.n_ranks
        self._whole_s = [0.0] * schedule.n_stages
        self.found: list[GatheredRow] = []

    def ready_s(self, rank: int, index: int, stage: int, now_s: float) -> float:
        """When the rank's action of this index finds its stage whole; gathers before begin ``now_s``."""
        for gather in self._before[rank][index] if self._before else ():
            if not gather.is_end:
                start_s = max(now_s, self._free_s[rank])
                end_s = start_s + self._seconds[gather.stage]
                self._free_s[rank] = self._whole_s[gather.stage] = end_s
                self.found.append((rank, gather.stage, start_s, end_s))
        return max(now_s, self._whole_s[stage])


def run(
    schedule: Schedule,
    times: Sequence[StageTimes],
    edges: Edges,
    cluster: Cluster | None = None,
    gathering: Gathering | None = None,
    *,
    beside_s: Sequence[float] = (),
) -> Clock:
    """Every action as early as its rank, its inputs and its weights allow. O(actions + messages).

    ``beside_s``: what each action of :attr:`Schedule.order` takes beside its stage's time; not where ranks
    share an interface, whose complexity is the logarithm of the ranks times as much.
    """
    if cluster is not None and cluster.shared_nics:
        return _run_shared(schedule, times, edges, cluster, gathering)
    ins, outs, n_links = wiring(schedule, edges, cluster)
    seconds = [t for stage in times for t in stage.by_code]
    free = [0.0] * schedule.n_ranks
    link_free = [0.0] * n_links
    starts: list[list[float]] = [[] for _ in free]
    ends: list[list[float]] = [[] for _ in free]
    sent = []
    for (rank, code, m), beside in zip(schedule.order, beside_s or itertools.repeat(0.0), strict=False):
        t = free[rank]
        if gathering is not None:
            t = gathering.ready_s(rank, len(starts[rank]), code >> 2, t)
        for arrivals in ins[code]:
            if arrivals[m] > t:
                t = arrivals[m]
        starts[rank].append(t)
        t += seconds[code] + beside
        ends[rank].append(t)
        free[rank] = t
        for arrivals, link, busy, latency, (a, b, back, n_bytes) in outs[code]:
            if link < 0:
                arrivals[m] = t
                continue
            start = link_free[link]
            if start < t:
                start = t
            link_free[link] = start + busy
            arrivals[m] = start + busy + latency
            sent.append((a, b, back, m, start, arrivals[m], n_bytes))
    return Clock(schedule, starts, ends, sent, gathering.found if gathering else [])


def _run_shared(
    schedule: Schedule,
    times: Sequence[StageTimes],
    edges: Edges,
    cluster: Cluster,
    gathering: Gathering | None,
) -> Clock:
    """The same where messages to other hosts also wait for the interfaces that ranks share.

    Actions end in the order of time, and so messages ask for an interface: first come, first served.
    """
    ins, outs, n_links = wiring(schedule, edges, cluster, unknown=math.inf)
    seconds = [t for stage in times for t in stage.by_code]
    rows: list[list[tuple[int, int]]] = [[] for _ in range(schedule.n_ranks)]
    for rank, code, m in schedule.order:
        rows[rank].append((code, m))
    starts: list[list[float]] = [[] for _ in rows]
    ends: list[list[float]] = [[] for _ in rows]
    link_free, wire_free, sent = [0.0] * n_links, [0.0] * (2 * schedule.n_ranks), []
    placed = schedule.placement
    held_by = [
        [(out, cluster.wires(placed[out[4][0]], placed[out[4][1]]) if out[2] else ()) for out in row]
        for row in outs
    ]
    running: list[tuple[float, int]] = []
    whole: list[list[float]] = [[] for _ in rows]

    def start(rank: int) -> None:
        """Begins a rank's next action once the rank is free and all it needs has a time of arrival."""
        done = len(ends[rank])
        if done == len(rows[rank]) or len(starts[rank]) > done:
            return
        code, m = rows[rank][done]
        t = ends[rank][-1] if done else 0.0
        if gathering is not None:
            if len(whole[rank]) == done:  # asked for once, whenever its inputs arrive
                whole[rank].append(gathering.ready_s(rank, done, code >> 2, t))
            t = whole[rank][done]
        for arrivals in ins[code]:
            t = max(t, arrivals[m])
        if t < math.inf:
            starts[rank].append(t)
            heapq.heappush(running, (t + seconds[code], rank))

    for rank in range(schedule.n_ranks):
        start(rank)
    while running:
        t, rank = heapq.heappop(running)
        code, m = rows[rank][len(ends[rank])]
        ends[rank].append(t)
        for (arrivals, link, busy, latency, (a, b, back, n_bytes)), held in held_by[code]:
            left = t
            if link >= 0:
                left = max(t, link_free[link])
                for w in held:
                    left = max(left, wire_free[w])
                link_free[link] = left + busy
                for w in held:
                    wire_free[w] = left + busy
                sent.append((a, b, back, m, left, left + busy + latency, n_bytes))
            arrivals[m] = left + busy + latency
            start(placed[b])
        start(rank)
    return Clock(schedule, starts, ends, sent, gathering.found if gathering else [])


def wiring(
    schedule: Schedule, edges: Edges, cluster: Cluster | None, *, unknown: float = 0.0
) -> tuple[list[list[list[float]]], list[list[_Out]], int]:
    """Per action code, the arrival arrays it waits for and the messages it sends; and the number of links.

    The arrays have a time per microbatch, ``unknown`` until the message's sender has run.
    """
    n = schedule.n_stages
    ins: list[list[list[float]]] = [[] for _ in range(4 * n)]
    outs: list[list[_Out]] = [[] for _ in range(4 * n)]
    links: dict[tuple[int, int], int] = {}
    for back, rows in ((False, edges.forward), (True, edges.backward)):
        for a, row in enumerate(rows):
            for b, n_bytes in row.items():
                here, there = schedule.placement[a], schedule.placement[b]
                arrivals = [unknown] * schedule.n_microbatches
                link, busy, latency = -1, 0.0, 0.0
                if here != there:
                    link = links.setdefault((here, there), len(links))
                    if cluster is not None and n_bytes:
                        busy, latency = cluster.link(here, there).parts(n_bytes)
                out = (arrivals, link, busy, latency, (a, b, back, n_bytes))
                for kind in (1, 2) if back else (F,):
                    ins[4 * b + kind].append(arrivals)
                    outs[4 * a + kind].append(out)
    return ins, outs, len(links)
