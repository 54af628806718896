"""What it costs a step that microbatches take unlike times: ranks wait where a peer's takes longer than most.

Even steps are timed by ``schedule.clock``; how unlike times are is measured by ``measure``.

The time an action takes spreads about its mean as a sum of many small disturbances does: its variance grows
with its length, ``jitter_s`` for each second. A step is the longest of many sums of such times, so it is
longer on average than the step of the averages (Jensen's inequality), and that difference is the price. It is
drawn, always from the same seed, in pairs that deviate oppositely: what makes one of a pair longer without
any waiting makes the other as much shorter, so few pairs tell, and none tells of less than nothing.

Known error: every rank is taken to have a processor and a network interface of its own.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

from ..hardware import Cluster
from ..schedule import Schedule, StageTimes
from ..schedule.clock import Edges, run

__all__ = ["uneven_s"]

_MOST_PAIRS = 16
_DRAWN = 1 << 13
"""Actions that are drawn in all, where one pair does not have more: long steps even out what is chance."""
_SEED = 1


def uneven_s(
    schedule: Schedule,
    times: Sequence[StageTimes],
    edges: Edges,
    cluster: Cluster | None,
    jitter_s: float,
) -> float:
    """Seconds by which a step is longer on average than its actions' mean times say.

    ``jitter_s``: the variance of an action's time, in square seconds for each of its seconds. None is waited
    for longer where ranks outnumber cores: who waits then leaves its core to another.

    O(actions + messages), up to 32 times for short steps.
    """
    if not jitter_s or (cluster is not None and cluster.crowd is not None):
        return 0.0
    machine = dataclasses.replace(cluster, nics=()) if cluster is not None else None
    lengths = [times[code >> 2].by_code[code & 3] for _, code, _ in schedule.order]
    spreads = [min(math.sqrt(jitter_s * t), t) for t in lengths]
    drawn, n_pairs = random.Random(_SEED), max(1, min(_MOST_PAIRS, _DRAWN // (2 * len(lengths) or 1)))

    def length_s(beside: Sequence[float]) -> float:
        return max(row[-1] for row in run(schedule, times, edges, machine, beside_s=beside).ends_s if row)

    even_s, found_s = length_s(()), 0.0
    for _ in range(n_pairs):
        # no action takes less than nothing, and of a pair both ends are cut off alike
        apart = [max(-t, min(t, s * drawn.gauss(0.0, 1.0))) for t, s in zip(lengths, spreads, strict=True)]
        found_s += length_s(apart) + length_s([-x for x in apart])
    return max(0.0, found_s / (2 * n_pairs) - even_s)
