"""When actions start and end where ranks share a machine: its cores, its memory, the work of its messages.

Ranks that have a processor each are left to ``schedule.clock``, which is exact for them.

On one host ``k`` ranks at work progress at the rate

::

    min(1, cores / k) / slowdown(k),    slowdown(1) = alone, slowdown(cores) = 1, linear in between

where ``alone`` is what the costs were with nobody else at work, as a part of what they are with every core
busy. A message takes a core's time at both its ends: who sends it works so much longer, and who receives it
does where it is at work and no core is free. What a rank does between two actions (``Device.action_s``)
delays the next. Known error: cores are handed round more evenly than an
operating system does, and one ``alone`` stands for every stage.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence

from ..hardware import Cluster
from ..schedule import Schedule, StageTimes
from ..schedule.clock import Clock, Edges, SentRow, wiring
from .timeline_data import Event

__all__ = ["is_shared", "run_shared"]


def is_shared(cluster: Cluster, n_ranks: int, alone: float) -> bool:
    """Whether ranks of a cluster slow one another down."""
    if not cluster.cores or n_ranks < 2:
        return False
    hosts = [cluster.host(rank) for rank in range(n_ranks)]
    works = any(
        cluster.link(a, b).working_s(1) for a in range(n_ranks) for b in range(a) if hosts[a] == hosts[b]
    )
    between = any(device.action_s for device in cluster.devices)
    return cluster.crowd is not None or works or between or (alone != 1.0 and len(set(hosts)) < len(hosts))


def run_shared(
    schedule: Schedule,
    times: Sequence[StageTimes],
    edges: Edges,
    cluster: Cluster,
    *,
    alone: float = 1.0,
    optimizer_s: Sequence[float] = (),
) -> tuple[Clock, tuple[Event, ...]]:
    """Every action as early as its inputs allow, at the pace its host leaves it; and the optimizers' steps.

    O((actions + messages) × ranks).
    """
    machine = _Machine(schedule, times, edges, cluster, alone, optimizer_s)
    while machine.advance():
        pass
    return Clock(schedule, machine.starts, machine.ends, machine.sent), tuple(machine.stepped)


@dataclasses.dataclass(slots=True)
class _Rank:
    """What one rank is at: the code and microbatch of its actions, how many are over, what is left of one.

    ``sending_s`` is the work that what ended at ``ended_s`` has left to do: its messages', and between
    actions.
    """

    actions: list[tuple[int, int]]
    host: int
    optimizer_s: float
    n_done: int = 0
    left: float | None = None
    started_s: float = 0.0
    ended_s: float = 0.0
    sending_s: float = 0.0


class _Machine:
    """All ranks at one moment, and the messages under way."""

    def __init__(
        self,
        schedule: Schedule,
        times: Sequence[StageTimes],
        edges: Edges,
        cluster: Cluster,
        alone: float,
        optimizer_s: Sequence[float],
    ) -> None:
        self.placement, self.cluster, self.alone = schedule.placement, cluster, alone
        self.ins, self.outs, n_links = wiring(schedule, edges, cluster, unknown=math.inf)
        self.seconds = [t for stage in times for t in stage.by_code]
        self.ranks = [
            _Rank(
                [(4 * a.stage + "FBIW".index(a.kind), a.microbatch) for a in row],
                cluster.host(r),
                optimizer_s[r] if optimizer_s else 0.0,
            )
            for r, row in enumerate(schedule.actions)
        ]
        self.between_s = [device.action_s for device in cluster.devices]
        self.now = 0.0
        self.link_free, self.wire_free = [0.0] * n_links, [0.0] * (2 * schedule.n_ranks)
        self.coming: list[tuple[float, int, float]] = []
        self.starts: list[list[float]] = [[] for _ in self.ranks]
        self.ends: list[list[float]] = [[] for _ in self.ranks]
        self.sent: list[SentRow] = []
        self.stepped: list[Event] = []

    def advance(self) -> bool:
        """Go on to the next moment at which something ends or arrives; False when all is over."""
        for r, rank in enumerate(self.ranks):
            if rank.left is None:
                self._start(r, rank)
        paces = self._paces()
        due = {r: self.now + x.left / paces[x.host] for r, x in enumerate(self.ranks) if x.left is not None}
        then = min(*due.values(), self.coming[0][0] if self.coming else math.inf, math.inf)
        if then == math.inf:
            return False
        for r in due:
            rank = self.ranks[r]
            assert rank.left is not None
            rank.left -= (then - self.now) * paces[rank.host]
        self.now = then
        for r, due_s in due.items():
            if due_s <= then:
                self._end(r, self.ranks[r])
        while self.coming and self.coming[0][0] <= then:
            _, r, work_s = heapq.heappop(self.coming)
            self._disturb(self.ranks[r], work_s)
        return True

    def _start(self, r: int, rank: _Rank) -> None:
        """Begin what is next, where its inputs are there."""
        if rank.n_done < len(rank.actions):
            code, m = rank.actions[rank.n_done]
            if any(arrivals[m] > self.now for arrivals in self.ins[code]):
                return
            rank.left = self.seconds[code]
            self.starts[r].append(self.now)
        elif rank.n_done == len(rank.actions) and rank.optimizer_s:
            rank.left = rank.optimizer_s
        else:
            return
        rank.started_s = self.now
        rank.left += max(0.0, rank.sending_s - (self.now - rank.ended_s))
        rank.sending_s = 0.0

    def _end(self, r: int, rank: _Rank) -> None:
        """End what a rank is at, and send what it made."""
        rank.left, rank.ended_s = None, self.now
        rank.n_done += 1
        if rank.n_done > len(rank.actions):
            self.stepped.append(Event(r, "optimizer", rank.started_s, self.now))
            return
        self.ends[r].append(self.now)
        rank.sending_s = self.between_s[r]
        code, m = rank.actions[rank.n_done - 1]
        for arrivals, link, busy_s, latency_s, (a, b, back, n_bytes) in self.outs[code]:
            arrivals[m] = self.now
            if link < 0:
                continue
            to = self.placement[b]
            held = self.cluster.wires(r, to) if busy_s else ()
            left_s = max([self.now, self.link_free[link], *(self.wire_free[w] for w in held)])
            self.link_free[link] = left_s + busy_s
            for w in held:
                self.wire_free[w] = left_s + busy_s
            arrivals[m] = left_s + busy_s + latency_s
            self.sent.append((a, b, back, m, left_s, arrivals[m], n_bytes))
            work_s = self.cluster.link(r, to).working_s(n_bytes)
            rank.sending_s += work_s
            heapq.heappush(self.coming, (arrivals[m], to, work_s))

    def _disturb(self, rank: _Rank, work_s: float) -> None:
        """A message that arrives takes its work from who is busy there, where no core is free."""
        active = sum(x.left is not None for x in self.ranks if x.host == rank.host)
        if rank.left is not None and active >= self.cluster.cores[rank.host]:
            rank.left += work_s

    def _paces(self) -> dict[int, float]:
        """By host, how fast a rank at work there progresses."""
        active: dict[int, int] = {}
        beside: dict[int, int] = {}
        for rank in self.ranks:
            beside[rank.host] = beside.get(rank.host, 0) + 1
            active[rank.host] = active.get(rank.host, 0) + (rank.left is not None)
        return {host: self._pace(n, self.cluster.cores[host], beside[host]) for host, n in active.items()}

    def _pace(self, n_active: int, n_cores: int, n_ranks: int) -> float:
        most = min(n_cores, n_ranks)
        crowd = (min(n_active, most) - 1) / (most - 1) if most > 1 and n_active else 0.0
        slowdown = self.alone + (1.0 - self.alone) * crowd if most > 1 else 1.0
        return min(1.0, n_cores / max(n_active, 1)) / slowdown
