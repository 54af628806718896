"""What no step can be shorter than: fill, bottleneck and drain, and one microbatch's way through the model.

A bound on single loads is left to ``bounds``, on what memory has computed again to ``memory``. Everything
here holds for every assignment of ops to stages.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..definition.problem import Problem

__all__ = ["PRECISE", "Line", "Work", "least_step_ns", "least_work_ns"]

Floats = npt.NDArray[np.float64]

PRECISE = 1e-6
"""Times are rounded to nanoseconds per op, so a bound of their sums is taken so much lower."""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Nanoseconds per microbatch at speed 1: of all ops, of the dearest, and along the longest paths of data.

    ``longer_ns`` is that of all forwards or of all backwards, whichever is longer. ``forward_path_ns`` counts
    forwards, ``path_ns`` forwards and backwards of ops that gradients reach. ``aside_ns`` is the most that a
    stage holds which has no op of the latter path, and ``hop_bytes`` are the fewest of a value that one op
    of it passes to the next.
    """

    total_ns: float
    longer_ns: float
    dearest_ns: float
    forward_path_ns: float
    path_ns: float
    aside_ns: float
    hop_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Alike ranks with a stage each, taking forwards and backwards in turn (1F1B) or forwards first (GPipe).

    Nanoseconds are per microbatch. Let each rank have an op of the path of data, w = f + b be a rank's work,
    in forward and in backward, P that of those before it, V of those after, T of all, and m the microbatches;
    M of a step, so that

    - 1F1B: at most k = min(ranks − r, m) microbatches are in flight on rank r. It begins after P's forwards
      and ends before P's backwards, and works m · w between. From the end of its first forward to its first
      backward, a microbatch passes V both ways, and there are k − 1 forwards to do meanwhile: it waits
      V − (k − 1) · f at least. Nor does it get the k-th forward, which comes first, sooner than k − 1 times
      the longest forward of a rank before it lets it. From its last forward to its last backward likewise,
      with k − 1 backwards, and ranks before it have as many to do after the first of these.
      With k < m the one is over when the other begins, and with k = m the waiting is in both. So
      P + m · w + the sum, or the larger, of what of these two is over 0 ≤ step.
    - GPipe: the last rank ends its forwards after T's and m − 1 of any rank's, and its first backward comes
      after: T + (m − 1) · w ≤ step.

    A microbatch takes ``hop_ns`` at least from a rank's forward to the next one's and back, which counts like
    work of P and of V. A rank without an op of the path holds at most ``aside_ns``, and counts as one without
    work: what is said of it then is said of the others too, but for the message past it, which P and V count
    once each.
    """

    n_ranks: int
    n_microbatches: int
    in_turn: bool
    hop_ns: float = 0.0

    def sum_of(
        self,
        r: int,
        before: Floats,
        forward: Floats,
        backward: Floats,
        after: Floats,
        longest: tuple[Floats, Floats],
    ) -> Floats:
        """What is at most the step: of rank ``r``, and what ranks before it and after it work and pass on.

        ``longest`` are the longest forward and backward of a rank before it. Of arrays of any shapes that fit
        together, in any unit of time; it rises with each of them.
        """
        m, k = self.n_microbatches, min(self.n_ranks - r, self.n_microbatches)
        busy = before + m * (forward + backward)
        if not self.in_turn:
            return busy + after
        filling, draining = (
            np.maximum(0.0, np.maximum(after, (k - 1) * most) - (k - 1) * own)
            for own, most in zip((forward, backward), longest, strict=True)
        )
        waiting = filling + draining if k < m else np.maximum(filling, draining)
        out: Floats = busy + waiting
        return out

    def sums(self) -> list[list[float]]:
        """For each rank, what all ranks' works are weighed by in a sum that is at most :meth:`sum_of`.

        However a rank's work is divided into forward and backward, and whatever waiting comes to.
        """
        n, m = self.n_ranks, self.n_microbatches
        if not self.in_turn:
            return [[m if r == x else 1.0 for x in range(n)] for r in range(n)]
        rows = []
        for r in range(n):
            k = min(n - r, m)
            own, after = (m - k + 1, 2.0) if k < m else (1 + (m - 1) / 2, 1.0)
            rows.append([1.0] * r + [own] + [after] * (n - r - 1))
        return rows

    def most_works(self, total: float, step: float) -> list[float]:
        """What each rank works at most where all work ``total`` at least and a step is no longer than so.

        By :meth:`sums`: each is all work, more of the rank's own, and what comes after it once more, which is
        all but what may be before it; and each rank does all microbatches. In any unit of time.
        """
        most: list[float] = []
        for x, row in enumerate(self.sums()):
            own, again = row[x] - 1, (row[-1] - 1) * (x + 1 < self.n_ranks)
            ways = [(step - total) / own] if own > 0 else []
            ways += [(step - total - again * (total - sum(most))) / (own - again)] if own > again else []
            most.append(max(0.0, min([step / self.n_microbatches, *ways])))
        return most

    def least_ns(self, total_ns: float, longer_ns: float, fullest_ns: float, aside_ns: float) -> float:
        """A bound on the step from all ranks' work, all forwards' or backwards' if longer, and the fullest's.

        1F1B of more microbatches than ranks: on the fullest rank, before which there is at most r · w, the
        sum is (m − ranks − 1) · w + 2 T at least. Of no more: with D the step less T, the last j ranks hold
        at most j · D / (m − 1) together, for all j < m by induction from the last, and of forwards and of
        backwards no rank more than D / (m − 1).
        """
        m, n_ranks = self.n_microbatches, self.n_ranks

        def least(n: int) -> float:
            """Where so many ranks have an op of the path."""
            lost_ns = (n_ranks - n) * aside_ns
            of_path_ns = total_ns - lost_ns
            if self.in_turn and m <= n_ranks:
                each_ns = max(of_path_ns / (2 * n_ranks - m + 1), (longer_ns - lost_ns) / n_ranks)
                return of_path_ns + (m - 1) * each_ns
            own_ns = max(of_path_ns / n, fullest_ns if n == n_ranks or fullest_ns > aside_ns else 0.0)
            return of_path_ns + (m - 1) * own_ns + self.in_turn * (of_path_ns - n_ranks * own_ns)

        return max(0.0, min(map(least, range(1, n_ranks + 1))))


def least_step_ns(
    work: Work, speeds: Sequence[float], n_microbatches: int, *, in_line: bool, split: bool, line: Line | None
) -> float:
    """A bound on the step of every plan on ranks of these speeds.

    ``in_line``: each rank holds one stage. Then a rank that holds a part of a path of data waits for the
    parts before it, and they for its gradient, unless the backward is ``split`` and weight gradients may come
    last: with B for the step and M microbatches, M · work + (parts of the path before) ≤ B on every rank.
    Summed up, the path is at most B · (1 − (1 − 1/M)^ranks), less what the ranks do beside it.
    ``line``: what more is known of the order that the ranks keep.
    """
    m, fastest = n_microbatches, max(speeds)
    share = m * work.total_ns / sum(speeds)
    paths = (work.forward_path_ns,) if split else (work.forward_path_ns, work.path_ns)
    least = max(share, m * work.dearest_ns / fastest, max(paths) / fastest)
    if in_line and len(set(speeds)) == 1:
        least = max(least, *(_filled_ns(work.total_ns, path, len(speeds), m) / fastest for path in paths))
    if line is not None:
        in_order_ns = line.least_ns(work.total_ns, work.longer_ns, work.dearest_ns, work.aside_ns)
        least = max(least, in_order_ns / fastest)
    return least * (1 - PRECISE)


def least_work_ns(problem: Problem, lower_ns: int) -> int:
    """What the fullest stage works at least where no bottleneck is under a bound; 0 if that is not known.

    That is where the bottleneck may be the host's work, or transfers: they take on any stage no more than all
    values together, each sent or received.
    """
    if problem.has_hosts:
        return 0
    moving = syncing = 0
    tables = {id(rows): rows for rows in (problem.pair_ns or {}).values()}.values()
    for n, net in enumerate(problem.nets):
        prices = [net.prices_ns((0, 0)), *net.link_ns, *(rows[n] for rows in tables)]
        n_sent = 1 if problem.sender_pays == "once" else len(net.consumers)
        moving += max(max(n_sent * send, receive) for send, receive in prices)
    for share in problem.shares:
        syncing += max([share.sync_ns, *share.more_ns, *(ns for row in share.link_ns for ns in row)])
    floor = lower_ns - syncing
    return max(0, (floor if moving < floor else 0) if problem.overlap else floor - moving)


def _filled_ns(total_ns: float, path_ns: float, n_ranks: int, m: int) -> float:
    """The least B that leaves room for the path and for the rest, by bisection."""
    rest_ns = max(0.0, total_ns - path_ns)
    low, high = m * total_ns / n_ranks, m * total_ns
    for _ in range(60):
        middle = (low + high) / 2
        # ranks that the rest of the work fills, and so do nothing of the path
        beside = math.floor(rest_ns * m / middle) if middle else 0
        room = middle * (1 - (1 - 1 / m) ** (n_ranks - beside)) if beside < n_ranks else 0.0
        low, high = (low, middle) if room >= path_ns else (middle, high)
    return low
