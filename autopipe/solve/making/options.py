"""What is asked of a solve, checked: what a plan may be, and what is tried; numbers become Python's own.

What problems are made of it is left to ``formulate``, what is tried to ``cases``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ...arguments import Check, brief, flag, mapping, names, number, plain, sequence, whole, word
from ...errors import InputError
from ...hardware import MOST_RANKS
from ...plans import Plan
from ...presets import ADAM
from ...units import parse_bytes
from .baselines import Weigh

__all__ = ["CHECKS", "Limit", "Options", "Settings", "options_of"]

Limit = str | float | Sequence[str | float] | None
"""Bytes of every rank, or of each; None for no limit but the devices' own."""


def _groups(name: str, value: Any) -> tuple[tuple[str, ...], ...]:
    groups = sequence(name, value, "a list of lists of names")
    return tuple(names(f"{name}[{x}]", group) for x, group in enumerate(groups))


def _pins(name: str, value: Any) -> dict[str, int]:
    none: dict[str, int] = {}
    given = (
        none
        if value is None
        else mapping(name, value, "a dict of module path to stage, such as {'lm_head': 3}")
    )
    for path, stage in given.items():
        if plain(stage) is None:
            raise InputError(
                f"{name}[{path!r}] is {brief(stage)}; it must be a stage's number: 0, or -1 for the last"
            )
    return {path: whole(f"{name}[{path!r}]", stage, -MOST_RANKS, MOST_RANKS) for path, stage in given.items()}


def _limits(name: str, value: Any) -> int | tuple[int, ...] | None:
    if value is None:
        return None
    is_one = isinstance(value, str) or plain(value) is not None
    wanted = "bytes such as '70GB', or a list of one for each rank"
    try:
        return parse_bytes(value) if is_one else tuple(map(parse_bytes, sequence("it", value, wanted)))
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


CHECKS: Mapping[str, Check] = {
    "memory_limit": _limits,
    "ties": word("auto", "sync", "colocate"),
    "pin": _pins,
    "together": _groups,
    "uncut": names,
    "recompute": word("never", "auto", "always"),
    "clone": word("auto", "never", "always"),
    "overlap": flag,
    "sender_pays": word("once", "receiver"),
    "device_order": word("hosts", "given", "auto"),
    "loss_on": word("microbatches", "batch"),
    "optimizer_bytes_per_parameter_byte": lambda name, value: number(name, value, -2, 1e6, above=True),
    "n_microbatches": whole,
}
"""What each may be; the other options are checked where cases are made of them."""


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
    device_order: ``"hosts"`` lays the stages on the ranks host by host, each host's in their order, so that
        neighbours are on one host where they can be; ``"given"`` in the ranks' order; ``"auto"`` looks for
        the best one (all that differ, or swaps where they are many). The order is in the stages' ranks.
    loss_on: ``"batch"`` where the loss takes the outputs of all microbatches at once, once every forward has
        run: under a schedule that waits for that, which keeps them all; ``"microbatches"`` where it does not.
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
    device_order: str = "hosts"
    loss_on: str = "microbatches"
    optimizer_bytes_per_parameter_byte: float = ADAM

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if (check := CHECKS.get(field.name)) is not None:
                object.__setattr__(self, field.name, check(field.name, getattr(self, field.name)))

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
    """

    n_stages: int | str | None
    n_microbatches: int
    schedule: str = "1f1b"
    balance: str | Weigh = "cost"
    min_ranks: int = 1

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


def options_of(plan: Plan) -> dict[str, Any]:
    """The fields of :class:`Options` by which a plan is solved again, for as many ranks and stages.

    Where a callable weighed its ops, which no plan keeps, costs do.
    """
    fields = {field.name for field in dataclasses.fields(Options)}
    kept = {name: value for name, value in plan.settings.items() if name in fields and value is not None}
    if kept.get("balance") == "callable":
        kept["balance"] = "cost"
    counts = {"n_stages": plan.n_stages, "n_microbatches": plan.n_microbatches, "min_ranks": plan.n_ranks}
    return {**kept, **counts, "schedule": plan.schedule}
