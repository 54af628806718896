"""List scheduling: every rank takes the best action that is ready, under limits on what is in flight.

Which limits make a named schedule is left to ``templates``, which of several to take to ``cost_aware``.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence

from ..hardware import Cluster
from .actions import KINDS, Action, B, F, I, Schedule, StageTimes, Transfer, W
from .clock import Edges, wiring

__all__ = ["Rules", "list_schedule"]


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """What a list schedule may do.

    Attributes
    ----------
    split: run I and W in place of B.
    active: per stage, how many microbatches may be between F and B (or I); at least 1.
    held: per stage, how many may be between F and B (or W); at least 1.
    patience: rather than start a W, wait for an input known to arrive within this many W times.
    saved_bytes, budget_bytes: per stage, what a microbatch saves; per rank, how much all may save together.
    """

    split: bool
    active: tuple[int, ...]
    held: tuple[int, ...]
    patience: float = 0.0
    saved_bytes: tuple[int, ...] = ()
    budget_bytes: tuple[float, ...] = ()


def list_schedule(
    name: str,
    placed: Sequence[int],
    n_ranks: int,
    n_microbatches: int,
    rules: Rules,
    *,
    times: Sequence[StageTimes] | None = None,
    transfers: Sequence[Transfer] = (),
    cluster: Cluster | None = None,
) -> Schedule:
    """Backward when it is ready, else a forward within the limits, else a weight gradient.

    Every stage takes microbatches in order, and the oldest unfinished one may always go on: under count
    limits because nothing older is counted, under a budget because a rank keeps room for it to finish. So
    no limit deadlocks; a budget too small for one microbatch is exceeded by it alone.
    ``times`` default to F = I = W = 1, B = 2.

    Complexity: O(actions × (log ranks + stages per rank)).
    """
    empty = Schedule(name, tuple(placed), n_microbatches, ((),) * n_ranks)
    # Schedules are checked against the chain of stages, so they keep to it where no transfer asks for it.
    chain = tuple(Transfer(s, s + 1) for s in range(len(placed) - 1))
    edges = Edges.of(empty, (*transfers, *chain))
    listing = _Listing(empty, rules, times or (StageTimes(),) * len(placed), edges, cluster)
    return dataclasses.replace(empty, actions=listing.run())


class _Listing:
    """The clock and the counters of one list schedule."""

    def __init__(
        self,
        empty: Schedule,
        rules: Rules,
        times: Sequence[StageTimes],
        edges: Edges,
        cluster: Cluster | None,
    ) -> None:
        n_stages, n_ranks = empty.n_stages, empty.n_ranks
        self.placed, self.n, self.rules = empty.placement, empty.n_microbatches, rules
        self.seconds = [t for stage in times for t in stage.by_code]
        self.stages = [empty.stages_of(rank) for rank in range(n_ranks)]
        self.ins, self.outs, n_links = wiring(empty, edges, cluster, unknown=math.inf)
        self.backward = I if rules.split else B
        self.rows: list[list[Action]] = [[] for _ in range(n_ranks)]
        self.forwards, self.backwards, self.released = ([0] * n_stages for _ in range(3))
        self.used = [0.0] * n_ranks
        self.wake, self.free = [0.0] * n_ranks, [0.0] * n_ranks
        self.link_free = [0.0] * n_links
        self.heap = [(0.0, rank) for rank in range(n_ranks)]

    def run(self) -> tuple[tuple[Action, ...], ...]:
        while self.heap:
            now, rank = heapq.heappop(self.heap)
            if now != self.wake[rank]:
                continue
            choice, later = self._choose(rank, now)
            if choice is not None:
                self._do(rank, *choice, now)
                later = self.free[rank]
            self.wake[rank] = later
            if later < math.inf:
                heapq.heappush(self.heap, (later, rank))
        return tuple(map(tuple, self.rows))

    def _choose(self, rank: int, now: float) -> tuple[tuple[int, int] | None, float]:
        """(code, microbatch) of the best action that is ready, or None; and when the next input comes.

        Best: I or B before F before W, then the oldest microbatch, then the deepest stage.
        """
        best: tuple[int, int, int] | None = None
        chosen, later = 0, math.inf
        for s in self.stages[rank]:
            for urgency, code, m in self._candidates(rank, s):
                ready = max((arrivals[m] for arrivals in self.ins[code]), default=0.0)
                if ready > now:
                    later = min(later, ready)
                elif best is None or (urgency, m, -s) < best:
                    best, chosen = (urgency, m, -s), code
        if best is None or (chosen & 3 == W and later <= now + self.rules.patience * self.seconds[chosen]):
            return None, later
        return (chosen, best[1]), later

    def _candidates(self, rank: int, s: int) -> list[tuple[int, int, int]]:
        """(urgency, code, microbatch) of what the stage could do next, inputs aside."""
        out = []
        f, b, w = self.forwards[s], self.backwards[s], self.released[s]
        if b < f:
            out.append((0, 4 * s + self.backward, b))
        within = f < self.n and f - b < self.rules.active[s] and f - w < self.rules.held[s]
        if within and (not self.rules.budget_bytes or self._affordable(rank, s)):
            out.append((1, 4 * s + F, f))
        if w < b:
            out.append((2, 4 * s + W, w))
        return out

    def _affordable(self, rank: int, s: int) -> bool:
        """Whether, with the stage's next microbatch let in, all on the rank can still finish oldest first.

        Dijkstra's banker: each must find room for what it has yet to save beside what younger ones hold.
        """
        saved, own, budget = self.rules.saved_bytes, self.stages[rank], self.rules.budget_bytes[rank]
        room = budget - self.used[rank] - saved[s]
        oldest = min(self.released[t] for t in own)
        if self.forwards[s] == oldest or room == math.inf:
            return True
        done = {t: self.forwards[t] + (t == s) for t in own}
        for m in range(oldest, max(done.values())):
            if sum(saved[t] for t in own if done[t] <= m) > room:
                return False
            room += sum(saved[t] for t in own if self.released[t] <= m < done[t])
        return room >= 0

    def _do(self, rank: int, code: int, m: int, now: float) -> None:
        s, kind = code >> 2, code & 3
        self.free[rank] = end = now + self.seconds[code]
        self.rows[rank].append(Action(s, KINDS[kind], m))
        saved = self.rules.saved_bytes[s] if self.rules.saved_bytes else 0
        if kind == F:
            self.forwards[s] += 1
            self.used[rank] += saved
        if kind in (B, I):
            self.backwards[s] += 1
        if kind in (B, W):
            self.released[s] += 1
            self.used[rank] -= saved
        for arrivals, link, busy, latency, (_, target, _, _) in self.outs[code]:
            when = end
            if link >= 0:
                self.link_free[link] = max(self.link_free[link], end) + busy
                when = self.link_free[link] + latency
            arrivals[m] = when
            self._wake(self.placed[target], when)

    def _wake(self, rank: int, when: float) -> None:
        when = max(when, self.free[rank])
        if when < self.wake[rank]:
            self.wake[rank] = when
            heapq.heappush(self.heap, (when, rank))
