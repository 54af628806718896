"""What is asked of a solve, checked: what a plan may be, and what is tried; numbers become Python's own.

What problems are made of it is left to ``formulate``, what is tried to ``cases``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ...arguments import flag, number, one_of, whole
from ...hardware import MOST_RANKS
from ...memory import ADAM
from ...plans import Plan
from ...units import parse_bytes
from .baselines import Weigh

__all__ = ["Limit", "Options", "Settings", "options_of"]

Limit = str | float | Sequence[str | float] | None
"""Bytes of every rank, or of each; None for no limit but the devices' own."""

_MOST_RATIO = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a graph may be cut, and what a stage's load counts.

    Parameters
    ----------
    memory_limit: for every rank, or a sequence of one per rank; beside the devices' own.
    ties: ``"auto"`` and ``"sync"`` price synchronising against keeping users together; ``"colocate"``
        forces the latter (on ranks that hold several stages, it stays a price).
    pin: module path prefix or op name → stage; negative stages count from the end.
    together: groups of module paths or op names that share a stage.
    uncut: values (op names) that must not cross a boundary.
    recompute: ``"never"``, ``"auto"`` (where a rank would not fit otherwise, the cheapest blocks that let it,
        leaf modules or groups; whole stages where the backward is split) or ``"always"`` (whole stages).
    clone: whether cheap values are computed again where needed: ``"never"``, ``"always"``, or ``"auto"``: in
        every stage that takes one where that takes no longer than receiving it ever does; as is best for
        each stage where that takes no longer than sending and receiving it ever do; else they are sent.
    overlap: whether transfers hide behind work. A stage's load is the larger of the two, else their sum.
    sender_pays: a value sent to several stages costs its sender ``"once"`` or per ``"receiver"``.
    """

    memory_limit: Limit = None
    ties: str = "auto"
    pin: Mapping[str, int] = dataclasses.field(default_factory=dict)
    together: Sequence[Sequence[str]] = ()
    uncut: Sequence[str] = ()
    recompute: str = "never"
    clone: str = "auto"
    overlap: bool = True
    sender_pays: str = "once"
    optimizer_bytes_per_parameter_byte: float = ADAM

    def __post_init__(self) -> None:
        ratio = "optimizer_bytes_per_parameter_byte"
        found = {
            "memory_limit": _parsed(self.memory_limit),
            "ties": one_of("ties", self.ties, ("auto", "sync", "colocate")),
            "pin": {
                path: whole(f"pin[{path!r}]", stage, -MOST_RANKS, MOST_RANKS)
                for path, stage in (self.pin or {}).items()
            },
            "together": tuple(map(tuple, self.together)),
            "uncut": tuple(self.uncut),
            "recompute": one_of("recompute", self.recompute, ("never", "auto", "always")),
            "clone": one_of("clone", self.clone, ("auto", "never", "always")),
            "overlap": flag("overlap", self.overlap),
            "sender_pays": one_of("sender_pays", self.sender_pays, ("once", "receiver")),
            ratio: number(ratio, self.optimizer_bytes_per_parameter_byte, most=_MOST_RATIO),
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @property
    def training(self) -> bool:
        """Whether there are backwards."""
        return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """The same, and what is to be tried.

    Parameters
    ----------
    n_stages: how many, or ``"auto"`` (or None) to pick them and the ranks: all counts of ranks up to the
        cluster's are solved, from ``min_ranks`` on, and the one with the shortest step wins.
    n_microbatches: how many, at the microbatch size of the costs.
    schedule: a name of ``schedule.NAMES``, or ``"auto"`` to simulate every one that the ranks allow.
    balance: ``"cost"``, ``"parameters"``, ``"uniform"``, or a callable from an op to its weight.
    device_order: ``"hosts"`` lays the stages on the ranks host by host, each host's in their order, so that
        neighbours are on one host where they can be; ``"given"`` in the ranks' order; ``"auto"`` looks for
        the best one (all that differ, or swaps where they are many). The order is in the stages' ranks.
    """

    n_stages: int | str | None
    n_microbatches: int
    schedule: str = "1f1b"
    balance: str | Weigh = "cost"
    device_order: str = "hosts"
    min_ranks: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "n_microbatches", whole("n_microbatches", self.n_microbatches))
        one_of("device_order", self.device_order, ("hosts", "given", "auto"))

    @property
    def training(self) -> bool:
        """Whether there are backwards."""
        return self.schedule != "forward-only"

    @property
    def any_order(self) -> bool:
        """Whether ranks may be in any order."""
        return self.device_order == "auto"

    @property
    def any_schedule(self) -> bool:
        """Whether every schedule is to be tried."""
        return self.schedule == "auto"


def _parsed(limit: Limit) -> Limit:
    if limit is None:
        return None
    if isinstance(limit, str) or not isinstance(limit, Sequence):
        return parse_bytes(limit)
    return tuple(map(parse_bytes, limit))


def options_of(plan: Plan) -> dict[str, Any]:
    """The fields of :class:`Options` by which a plan is solved again, for as many ranks and stages.

    Where a callable weighed its ops, which no plan keeps, costs do.
    """
    names = {field.name for field in dataclasses.fields(Options)}
    kept = {name: value for name, value in plan.settings.items() if name in names and value is not None}
    if kept.get("balance") == "callable":
        kept["balance"] = "cost"
    counts = {"n_stages": plan.n_stages, "n_microbatches": plan.n_microbatches, "min_ranks": plan.n_ranks}
    return {**kept, **counts, "schedule": plan.schedule}
