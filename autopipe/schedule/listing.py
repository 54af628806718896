"""List scheduling: every rank takes the best action that is ready, under limits on what is in flight.

Which limits and priorities make a named schedule is left to ``templates``.
"""

from __future__ import annotations

import collections
import heapq
import math
from collections.abc import Sequence

from .actions import Action, Kind, Schedule, StageTimes

__all__ = ["list_schedule"]


def list_schedule(
    name: str,
    placed: Sequence[int],
    n_ranks: int,
    n_microbatches: int,
    *,
    split: bool,
    active: Sequence[int],
    held: Sequence[int],
    times: Sequence[StageTimes] | None = None,
) -> Schedule:
    """Backward when it is ready, else a forward within the limits, else a weight gradient.

    ``active`` and ``held`` are at least 1 per stage: how many microbatches may be between F and B (or I),
    and between F and B (or W). Every stage takes microbatches in order, so the oldest unfinished one may
    always go on and no limit can deadlock. ``times`` default to F = I = W = 1, B = 2.

    Complexity: O(actions × (log ranks + stages per rank)).
    """
    return _Listing(placed, n_ranks, n_microbatches, split, active, held, times).run(name)


class _Listing:
    """The clock and the counters of one list schedule."""

    def __init__(
        self,
        placed: Sequence[int],
        n_ranks: int,
        n_microbatches: int,
        split: bool,
        active: Sequence[int],
        held: Sequence[int],
        times: Sequence[StageTimes] | None,
    ) -> None:
        n_stages = len(placed)
        self.placed, self.n, self.split = tuple(placed), n_microbatches, split
        self.active, self.held = active, held
        self.times = [t.by_code for t in times or (StageTimes(),) * n_stages]
        self.stages = [[s for s, r in enumerate(placed) if r == rank] for rank in range(n_ranks)]
        self.rows: list[list[Action]] = [[] for _ in range(n_ranks)]
        self.forward_at = [[0.0 if s == 0 else math.inf] * self.n for s in range(n_stages)]
        self.backward_at = [[math.inf] * self.n for _ in range(n_stages)]
        self.forwards, self.backwards, self.released = ([0] * n_stages for _ in range(3))
        self.pending: list[collections.deque[int]] = [collections.deque() for _ in range(n_stages)]
        self.wake = [0.0] * n_ranks
        self.free = [0.0] * n_ranks
        self.heap = [(0.0, rank) for rank in range(n_ranks)]

    def run(self, name: str) -> Schedule:
        while self.heap:
            now, rank = heapq.heappop(self.heap)
            if now != self.wake[rank]:
                continue
            choice, later = self._choose(rank, now)
            if choice is not None:
                self._do(rank, choice, now)
                later = self.free[rank]
            self.wake[rank] = later
            if later < math.inf:
                heapq.heappush(self.heap, (later, rank))
        return Schedule(name, self.placed, self.n, tuple(map(tuple, self.rows)))

    def _choose(self, rank: int, now: float) -> tuple[Action | None, float]:
        """The best action that is ready, or None and when to look again."""
        best: tuple[int, int, int] | None = None
        chosen: Kind = "F"
        later = math.inf
        for s in self.stages[rank]:
            for urgency, kind, m, ready in self._candidates(s):
                if ready > now:
                    later = min(later, ready)
                elif best is None or (urgency, m, -s) < best:
                    best, chosen = (urgency, m, -s), kind
        if best is None:
            return None, later
        return Action(-best[2], chosen, best[1]), later

    def _candidates(self, s: int) -> list[tuple[int, Kind, int, float]]:
        """(urgency, kind, microbatch, when its inputs are there) of what the stage could do next."""
        out: list[tuple[int, Kind, int, float]] = []
        f, b = self.forwards[s], self.backwards[s]
        if b < f:
            out.append((0, "I" if self.split else "B", b, self.backward_at[s][b]))
        if f < self.n and f - b < self.active[s] and f - self.released[s] < self.held[s]:
            out.append((1, "F", f, self.forward_at[s][f]))
        if self.pending[s]:
            out.append((2, "W", self.pending[s][0], 0.0))
        return out

    def _do(self, rank: int, action: Action, now: float) -> None:
        s, m, last = action.stage, action.microbatch, len(self.placed) - 1
        end = now + self.times[s]["FBIW".index(action.kind)]
        self.free[rank] = end
        self.rows[rank].append(action)
        if action.kind == "F":
            self.forwards[s] += 1
            if s == last:
                self.backward_at[s][m] = end
            else:
                self._arrive(self.forward_at, s + 1, m, end)
        elif action.kind == "W":
            self.pending[s].popleft()
            self.released[s] += 1
        else:
            self.backwards[s] += 1
            if self.split:
                self.pending[s].append(m)
            else:
                self.released[s] += 1
            if s:
                self._arrive(self.backward_at, s - 1, m, end)

    def _arrive(self, at: list[list[float]], s: int, m: int, when: float) -> None:
        at[s][m] = when
        rank = self.placed[s]
        if max(when, self.free[rank]) < self.wake[rank]:
            self.wake[rank] = max(when, self.free[rank])
            heapq.heappush(self.heap, (self.wake[rank], rank))
