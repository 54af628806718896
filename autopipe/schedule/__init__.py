"""Schedules as data: which rank runs which action of which stage and microbatch, in which order.

Timing them is left to ``simulator``, running them to ``runtime``.

Where a change goes: a named schedule to ``templates``, or to ``list_scheduling`` if it follows from rules; a
kind of action to ``actions``, its time to ``clock``, its messages to ``wire_order``, faults it can have to
``validate``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ..arguments import brief, whole
from ..errors import InputError
from ..hardware import Cluster
from .actions import Action, Schedule, StageTimes, Transfer, parse_action
from .cost_aware import cost_aware
from .drawing import draw
from .gathers import Gather, gathers
from .templates import BREADTH_FIRST, COST_AWARE, NAMES, SPLIT, placement, template
from .torch_csv import from_csv, to_csv
from .validate import check, in_flight
from .wire_order import Compute, Message, Recv, Send, Wire, wire_order

__all__ = [
    "BREADTH_FIRST",
    "COST_AWARE",
    "NAMES",
    "SPLIT",
    "Action",
    "Compute",
    "Gather",
    "Message",
    "Recv",
    "Schedule",
    "Send",
    "StageTimes",
    "Transfer",
    "Wire",
    "build",
    "check",
    "cost_aware",
    "draw",
    "from_csv",
    "gathers",
    "in_flight",
    "parse_action",
    "placement",
    "to_csv",
    "wire_order",
]

_default_placement = placement

MOST_ACTIONS = 2**18
"""Most forwards of all stages in a schedule, as many as are made and simulated in seconds."""

MOST_LISTED = 2**15
"""As many where the schedule is listed by the clock."""


def build(
    name: str,
    n_ranks: int,
    n_stages: int,
    n_microbatches: int,
    *,
    placement: Sequence[int] | None = None,
    times: Sequence[StageTimes] | None = None,
    transfers: Sequence[Transfer] | None = None,
    cluster: Cluster | None = None,
    saved_bytes: Sequence[int] = (),
    budget_bytes: Sequence[float] = (),
) -> Schedule:
    """The named schedule, for any ``n_microbatches`` ≥ 1.

    ``placement`` is the rank of each stage, by default the template's own. What follows it matters to
    ``"cost-aware"`` alone, see :func:`cost_aware`; a template with equal arguments is the same object.
    Raises :class:`InputError` for an unknown name, no microbatch, or a rank without a stage.

    >>> print(build("1f1b", 2, 2, 3))
    rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
    """
    if name not in NAMES:
        raise InputError(f"unknown schedule {brief(name)}; known are {', '.join(NAMES)}")
    n_ranks, n_stages = whole("n_ranks", n_ranks), whole("n_stages", n_stages)
    most = MOST_LISTED if name == COST_AWARE else MOST_ACTIONS
    n_microbatches = whole("n_microbatches", n_microbatches, most=max(1, most // n_stages))
    placed = _default_placement(name, n_ranks, n_stages) if placement is None else tuple(placement)
    if len(placed) != n_stages or set(placed) != set(range(n_ranks)):
        raise InputError(
            f"placement {placed} does not give each of {n_stages} stages a rank and each of {n_ranks} "
            f"ranks a stage"
        )
    if name == COST_AWARE:
        return cost_aware(
            placed,
            n_ranks,
            n_microbatches,
            times=times,
            transfers=transfers,
            cluster=cluster,
            saved_bytes=saved_bytes,
            budget_bytes=budget_bytes,
        )
    return _template(name, placed, n_ranks, n_microbatches)


_template = functools.lru_cache(maxsize=512)(template)
