"""Makes a plan of a model: the same on every rank, and the text that takes it from one to the others.

Recording is left to ``recording``, ranks and devices to ``machine``, costs to ``prices``, opening leaves to
``refine`` and the cut itself to ``solve``.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from .. import measure
from ..costs import CostTable
from ..errors import InfeasibleError, InputError, UndecidedError
from ..plans import Plan
from ..schema import written
from ..solve import Known, check_room, solve, usual_time_s
from ..solve.stopping import interrupts
from ..tracing import Capture
from .agree import decide_once, in_group
from .machine import cluster_for, is_host, of_the_job, stages_per_rank
from .options import Options
from .prices import costs_of, counts_to_try, microbatch_dims, read
from .recording import captured
from .refine import Planned, refine
from .training import Training

__all__ = ["make_plan"]

_logger = logging.getLogger(__name__)

Decision = tuple[Plan, CostTable, tuple[str, ...]]
"""A plan, what it rests on and the leaves opened for it: what ranks are told of one another's planning."""


def make_plan(
    model: nn.Module | Capture,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: Options,
    stall_limit_s: float | None = None,
) -> Planned:
    """What rank 0 decides for all."""
    place, cut, training = options.place, options.cut, options.training
    wanted = cut.n_stages if isinstance(cut.n_stages, int) else None
    whole = captured(model, args, kwargs, options.recording.written, stall_limit_s, options.asked)
    on = of_the_job(whole) if place.device is None else place.device
    decided_here: list[Capture] = []

    def decide() -> Decision:
        ranks = cluster_for(whole, place.cluster, place.n_ranks, wanted, cut.schedule, on)
        on_host = place.cluster is None and is_host(whole, on)
        _check_offload(training, options.solver.get("recompute"), on_host)
        most = ranks.n_ranks * stages_per_rank(cut.schedule) if wanted is None else wanted
        source = read(options.pricing.costs)
        counts = counts_to_try(whole, cut.n_microbatches, source, most)

        def asked(graph: Capture, pieces: int) -> dict[str, Any]:
            return {
                "n_stages": wanted,
                "min_ranks": ranks.n_ranks if in_group() else place.min_ranks,
                "n_microbatches": pieces,
                "schedule": cut.schedule,
                "balance": cut.balance,
                "optimizer_bytes_per_parameter_byte": training.ratio(graph.ops),
                **options.solver,
            }

        check_room(whole.ops, ranks, **asked(whole, counts[0]))

        def planned_for(pieces: int) -> Planned:
            known: dict[str, Known] = {}

            def price(graph: Capture) -> CostTable:
                dims = microbatch_dims(graph, pieces)
                table = costs_of(graph, source, on, dims, options.pricing.store, training.autocast(graph))
                return training.priced(table, ranks, graph.ops)

            def usual_s(graph: Capture) -> float:
                return usual_time_s(graph.ops, ranks)

            def solved(graph: Capture, table: CostTable, seconds: float, is_draft: bool) -> Plan:
                return solve(
                    graph.ops,
                    table,
                    ranks,
                    is_draft=is_draft,
                    known=known.setdefault(graph.ops.digest, {}),
                    time_limit_s=seconds,
                    **asked(graph, pieces),
                )

            may_open = cut.balance == "cost" and not isinstance(source, CostTable)
            limit_s = None if cut.time_limit_s is None else cut.time_limit_s / len(counts)
            return refine(whole, price, solved, usual_s, may_open=may_open, time_limit_s=limit_s)

        planned = _fastest(planned_for, counts)
        decided_here.append(planned.capture)
        return _with_settings(planned, whole, training), planned.costs, planned.opened

    plan, table, opened = decide_once(decide, _decision_to_text, _decision_of_text, stall_limit_s)
    final = decided_here[0] if decided_here else whole.open(*opened) if opened else whole
    return Planned(final, table, plan, opened)


def _fastest(planned_for: Callable[[int], Planned], counts: Sequence[int]) -> Planned:
    """The plan with the shortest step, all of one batch; on Ctrl-C, of those there are.

    Where there are several counts, its settings have the step of each.

    Raises :class:`UndecidedError` where there is none and one count was left open, else the
    :class:`InfeasibleError` of the first count.
    """
    found: dict[int, Planned] = {}
    failures: list[InfeasibleError] = []
    with interrupts() as stopped:
        for n in counts:
            try:
                found[n] = planned_for(n)
            except InfeasibleError as error:
                failures.append(error)
            except KeyboardInterrupt:
                if not found:
                    raise
            if found and stopped.is_set():
                break
    if not found:
        raise next((f for f in failures if isinstance(f, UndecidedError)), failures[0])
    best = min(found.values(), key=lambda planned: planned.plan.step_s)
    if len(counts) == 1:
        return best
    steps = {"steps_by_microbatches": {str(n): planned.plan.step_s for n, planned in found.items()}}
    settings = {**best.plan.settings, **steps}
    return dataclasses.replace(best, plan=dataclasses.replace(best.plan, settings=settings))


def _check_offload(training: Training, recompute: Any, on_host: bool) -> None:
    """Raise :class:`InputError` for activations offloaded that are not kept, or that are there already."""
    if not training.moves_activations:
        return
    if recompute == "always":
        raise InputError(
            f"offload is {training.offload!r} and recompute is 'always': stages that run again keep nothing "
            "to offload; use recompute='never' or 'auto'"
        )
    if on_host:
        raise InputError(
            f"offload is {training.offload!r}, but the stages run on this machine's processor, whose memory "
            "is the host's already; leave it out, or name what to plan for: device='H200', or a cluster"
        )


def _with_settings(planned: Planned, whole: Capture, training: Training) -> Plan:
    """The plan with what it was made from in its settings: leaves opened, training, what was not counted."""
    settings: dict[str, Any] = {"opened": list(planned.opened), "opened_from": whole.ops.digest}
    settings |= training.written
    uncounted = [note for note in planned.costs.notes if measure.UNCOUNTED in note]
    if uncounted and planned.costs.source == "estimated":
        settings["uncounted"] = uncounted[0]
        _logger.warning("the plan rests on estimates in which %s", uncounted[0])
    return dataclasses.replace(planned.plan, settings={**planned.plan.settings, **settings})


def _decision_to_text(decided: Decision) -> str:
    plan, table, opened = decided
    return written([plan.to_json(), table.to_dict(), opened])


def _decision_of_text(text: str) -> Decision:
    plan, table, opened = json.loads(text)
    return Plan.from_json(plan), CostTable.from_dict(table), tuple(opened)
