"""Holds predictions against what ran: a ledger of stage times, and cost tables corrected by it.

Timing the stages is left to ``runtime``, which reports them; making the prediction to ``profiler``.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ..costs import CostTable, OpCost
from ..errors import CostError
from ..plans import Plan
from ..schema import Name, Positive, Seconds, build
from .store import Store

__all__ = ["Entry", "entries", "opened", "recalibrate", "record"]

T = TypeVar("T")

_MOST = 50
"""Runs kept per model, device and dims; older ones make way."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One stage of one run: its ops, and seconds per microbatch as predicted and measured.

    ``predicted`` and ``measured`` are by action: F, and B or I and W. ``recompute`` says that the whole
    stage ran again in backward, ``recomputed`` which of its ops did otherwise. ``speed`` is the device's
    in the plan's cluster, of which costs know nothing.
    """

    ops: tuple[Name, ...]
    predicted: Mapping[Name, Seconds]
    measured: Mapping[Name, Seconds]
    recompute: bool = False
    recomputed: tuple[Name, ...] = ()
    speed: Positive = 1.0

    def error(self, action: str) -> float:
        """How far measured lies above predicted, relative."""
        return self.measured[action] / self.predicted[action] - 1


def record(store: Store, plan: Plan, table: CostTable, report: Mapping[str, Any]) -> tuple[Entry, ...]:
    """Adds a run to the ledger and returns its entries.

    ``report`` is the runtime's (``rt.report().to_dict()``): ``stages``, each with ``index``, ``predicted``
    and ``measured``. Stages that ran nothing are left out. One rank of a job records.
    """
    made = tuple(
        Entry(
            ops=plan.stages[stage["index"]].ops,
            predicted=dict(stage["predicted"]),
            measured=dict(stage["measured"]),
            recompute=plan.stages[stage["index"]].recompute,
            recomputed=tuple(op for ops in plan.stages[stage["index"]].recomputed for op in ops),
            speed=plan.cluster.devices[plan.stages[stage["index"]].rank].speed,
        )
        for stage in report["stages"]
        if stage["measured"]
    )
    key = _key(plan.graph_digest, table)
    runs = _kept(store, "ledger", key, list[list[dict[str, Any]]])
    runs.append([dataclasses.asdict(entry) for entry in made])
    store.put("ledger", key, runs[-_MOST:])
    before = _key(plan.settings.get("opened_from", plan.graph_digest), table)
    store.put("opened", before, list(plan.settings.get("opened", ())))
    return made


def opened(store: Store, graph_digest: str, table: CostTable) -> tuple[str, ...]:
    """The leaves that planning opened for the last recorded run: :func:`entries` hold for what came of it."""
    return tuple(_kept(store, "opened", _key(graph_digest, table), list[Name]))


def entries(store: Store, graph_digest: str, table: CostTable) -> tuple[Entry, ...]:
    """Every stage of every run recorded for a model at a table's dims and device, oldest first."""
    runs = _kept(store, "ledger", _key(graph_digest, table), list[list[Entry]])
    return tuple(entry for run in runs for entry in run)


def recalibrate(table: CostTable, ledger: Sequence[Entry]) -> CostTable:
    """The table with each op's seconds scaled so that its stages come out as measured, where they ran.

    An op's factor is the median, over the ledger's stages that hold it, of the stage's measured seconds
    over the sum of its ops' in ``table``; ops no stage held take the median of all. Forward and backward
    have factors of their own; where a stage or blocks of it recomputed, their part of its forward is taken
    off its backward first. Applying it twice changes nothing.

    Raises :class:`CostError` for an empty ledger.
    """
    if not ledger:
        raise CostError(
            "the ledger has no run of this model at these dims on this device; "
            "train some steps and record rt.report() first"
        )
    forward: dict[str, list[float]] = {}
    backward: dict[str, list[float]] = {}
    for entry in ledger:
        total = table.total(entry.ops)
        _note(forward, entry.ops, _forward_s(entry), total.forward_s)
        part = table.total(entry.recomputed).forward_s / total.forward_s if total.forward_s else 0.0
        again = _forward_s(entry) * (1.0 if entry.recompute else part)
        _note(backward, entry.ops, _backward_s(entry) - again, total.backward_s)
    f, b = _factors(forward, table), _factors(backward, table)
    costs = {op: _scaled(cost, f[op], b[op]) for op, cost in table.costs.items()}
    note = f"recalibrated on {len(ledger)} measured stages"
    kept = tuple(n for n in table.notes if not n.startswith("recalibrated on"))
    return dataclasses.replace(table, costs=costs, notes=(*kept, note))


def _kept(store: Store, kind: str, key: Mapping[str, Any], cls: type[list[T]]) -> list[T]:
    """What the store has under a key, as lists of what belongs there; empty for nothing."""
    return build(cls, store.get(kind, key) or [], f"the measurement {store.path(kind, key)}")


def _key(graph_digest: str, table: CostTable) -> dict[str, Any]:
    return {"graph": graph_digest, "device": table.device, "dims": dict(table.dims)}


def _forward_s(entry: Entry) -> float:
    """Measured, less what the device's speed explains."""
    return entry.measured.get("F", 0.0) * entry.speed


def _backward_s(entry: Entry) -> float:
    split = entry.measured.get("I", 0.0) + entry.measured.get("W", 0.0)
    return entry.measured.get("B", split) * entry.speed


def _note(out: dict[str, list[float]], ops: Sequence[str], measured_s: float, predicted_s: float) -> None:
    if measured_s > 0 and predicted_s > 0:
        for op in ops:
            out.setdefault(op, []).append(measured_s / predicted_s)


def _factors(ratios: Mapping[str, list[float]], table: CostTable) -> dict[str, float]:
    rest = statistics.median([r for row in ratios.values() for r in row]) if ratios else 1.0
    return {op: statistics.median(ratios[op]) if op in ratios else rest for op in table.costs}


def _scaled(cost: OpCost, forward: float, backward: float) -> OpCost:
    return dataclasses.replace(
        cost.scaled(backward),
        forward_s=cost.forward_s * forward,
        host_forward_s=cost.host_forward_s * forward,
    )
