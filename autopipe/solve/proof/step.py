"""What no step can be shorter than: fill, bottleneck and drain, and one microbatch's way through the model.

A bound on single loads is left to ``bounds``. Everything here holds for every assignment of ops to stages.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

__all__ = ["Work", "least_step_s"]

_PRECISE = 1e-6
"""Times are rounded to nanoseconds per op, so a bound of their sums is taken so much lower."""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Seconds per microbatch at speed 1: of all ops, of the dearest, and along the longest paths of data.

    ``forward_path_s`` counts forwards, ``path_s`` forwards and backwards of ops that gradients reach.
    """

    total_s: float
    dearest_s: float
    forward_path_s: float
    path_s: float


def least_step_s(
    work: Work, speeds: Sequence[float], n_microbatches: int, *, in_line: bool, split: bool
) -> float:
    """A bound on the step of every plan on ranks of these speeds.

    ``in_line``: each rank holds one stage. Then a rank that holds a part of a path of data waits for the
    parts before it, and they for its gradient, unless the backward is ``split`` and weight gradients may come
    last: with B for the step and M microbatches, M · work + (parts of the path before) ≤ B on every rank.
    Summed up, the path is at most B · (1 − (1 − 1/M)^ranks), less what the ranks do beside it.
    """
    m, fastest = n_microbatches, max(speeds)
    share = m * work.total_s / sum(speeds)
    paths = (work.forward_path_s,) if split else (work.forward_path_s, work.path_s)
    least = max(share, m * work.dearest_s / fastest, max(paths) / fastest)
    if in_line and len(set(speeds)) == 1:
        least = max(least, *(_filled_s(work.total_s, path, len(speeds), m) / fastest for path in paths))
    return least * (1 - _PRECISE)


def _filled_s(total_s: float, path_s: float, n_ranks: int, m: int) -> float:
    """The least B that leaves room for the path and for the rest, by bisection."""
    rest_s = max(0.0, total_s - path_s)
    low, high = m * total_s / n_ranks, m * total_s
    for _ in range(60):
        middle = (low + high) / 2
        # ranks that the rest of the work fills, and so do nothing of the path
        beside = math.floor(rest_s * m / middle) if middle else 0
        room = middle * (1 - (1 - 1 / m) ** (n_ranks - beside)) if beside < n_ranks else 0.0
        low, high = (low, middle) if room >= path_s else (middle, high)
    return low
