"""Makes a plan of a model: the same on every rank, and the text that takes it from one to the others.

Recording is left to ``recording``, ranks and devices to ``cluster``, costs to ``op_costs``, opening leaves to
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
from ..errors import AutopipeError, InfeasibleError, InputError, UndecidedError
from ..hardware import Cluster
from ..plans import Plan
from ..schema import written
from ..solve import Known, check_room, room_bytes, solve, usual_time_s
from ..solve.stopping import interrupts
from ..tracing import Capture
from ..units import n_of
from .agree import decide_once, in_group
from .checks import check_model
from .cluster import DeviceLike, cluster_for, given_cluster, is_host, of_the_job, stages_per_rank
from .op_costs import Costs, costs_of, counts_to_try, microbatch_dims, read
from .options import Options
from .recording import capture, captured
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
    if not isinstance(model, Capture) and not in_group():
        _check_room_ahead(model, args, kwargs, options)
    whole = captured(model, args, kwargs, options.recording.written, stall_limit_s, options.asked)
    device = _device(whole.model, options)
    decided_here: list[Capture] = []

    def decide() -> Decision:
        task = _Task.of(whole, options, device)
        planned = _fastest(task.planned, task.counts)
        decided_here.append(planned.capture)
        return _with_settings(planned, whole, options.training), planned.costs, planned.opened

    plan, table, opened = decide_once(decide, _decision_to_text, _decision_of_text, stall_limit_s)
    final = decided_here[0] if decided_here else whole.open(*opened) if opened else whole
    return Planned(final, table, plan, opened)


def _device(model: nn.Module, options: Options) -> DeviceLike:
    """The device to plan for, None for the model's own. That of a rank in a job becomes its current one.

    Costs are estimated for the first device of a cluster that says what its devices can do.
    """
    place = options.place
    if place.device is None and place.cluster is not None and options.pricing.costs == "estimated":
        first = given_cluster(place.cluster, None).devices[0]
        if first.flops_s:
            return first
    return of_the_job(model) if place.device is None else place.device


def _ranks(model: nn.Module, options: Options, device: DeviceLike) -> Cluster:
    place, cut = options.place, options.cut
    return cluster_for(model, place.cluster, place.n_ranks, cut.wanted, cut.schedule, device)


def _asked(options: Options, graph: Capture, ranks: Cluster, pieces: int) -> dict[str, Any]:
    """What the solver is asked for of a graph, for a batch in so many microbatches."""
    cut = options.cut
    return {
        "n_stages": cut.wanted,
        "min_ranks": ranks.n_ranks if in_group() else options.place.min_ranks,
        "n_microbatches": pieces,
        "schedule": cut.schedule,
        "balance": cut.balance,
        "optimizer_bytes_per_parameter_byte": options.training.ratio(graph.ops),
        **options.solver,
    }


def _check_room_ahead(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, options: Options
) -> None:
    """Raise :class:`InfeasibleError` where weights and gradients alone are too much for all ranks.

    Which of them stages hold is known of a recording alone: what no forward uses, none does. This one leaves
    sizes as they are, as which of them may vary takes longest to find.
    """
    check_model(model, args, kwargs)
    ranks = _ranks(model, options, _device(model, options))
    if (room := room_bytes(ranks, options.solver.get("memory_limit"))) is None:
        return
    trains = options.cut.schedule != "forward-only"
    held = [t for t in (*model.parameters(), *model.buffers()) if not nn.parameter.is_lazy(t)]
    if sum(t.numel() * t.element_size() * (1 + (trains and t.requires_grad)) for t in held) <= room:
        return
    fixed = {**options.recording.written, "dynamic": False}
    pieces = options.cut.n_microbatches if isinstance(options.cut.n_microbatches, int) else 1
    quick = capture(model, args, kwargs, **fixed)
    try:
        check_room(quick.ops, ranks, **_asked(options, quick, ranks, pieces))
    except InfeasibleError:
        raise
    except AutopipeError as error:  # ops that make sizes are not in it, which may be pinned
        _logger.info("not checked ahead for room: %s", error)


@dataclasses.dataclass(frozen=True, slots=True)
class _Task:
    """What is to be planned: a captured model, on which device and ranks, from which costs.

    ``counts``: the numbers of microbatches among which to choose.
    """

    whole: Capture
    options: Options
    device: DeviceLike
    ranks: Cluster
    costs: Costs
    counts: Sequence[int]

    @classmethod
    def of(cls, whole: Capture, options: Options, device: DeviceLike) -> _Task:
        """What options ask for. Raises :class:`AutopipeError` for what no plan can be made of."""
        place, cut = options.place, options.cut
        ranks = _ranks(whole.model, options, device)
        on_host = place.cluster is None and is_host(whole.model, device)
        _check_offload(options.training, options.solver.get("recompute"), on_host)
        _warn_of_unlike(ranks)
        most = cut.wanted or ranks.n_ranks * stages_per_rank(cut.schedule)
        costs = read(options.pricing.costs)
        counts = counts_to_try(whole, cut.n_microbatches, costs, most)
        check_room(whole.ops, ranks, **_asked(options, whole, ranks, counts[0]))
        return cls(whole, options, device, ranks, costs, counts)

    @property
    def _names_ops(self) -> bool:
        """Whether ops are asked for by their names, which others have once modules are opened."""
        asked = self.options.solver
        given = {*asked.get("pin", ()), *(name for group in asked.get("together", ()) for name in group)}
        ops = self.whole.ops
        paths = [f"{op.module_path}." for op in ops.compute]
        named = (n for n in given if n in ops.by_name and not any(p.startswith(f"{n}.") for p in paths))
        return bool(asked.get("uncut")) or any(named)

    def planned(self, n_microbatches: int) -> Planned:
        """The best plan found for so many microbatches."""
        options, cut, known = self.options, self.options.cut, dict[str, Known]()

        def price(graph: Capture) -> CostTable:
            dims, autocast = microbatch_dims(graph, n_microbatches), options.training.autocast(graph)
            table = costs_of(graph, self.costs, self.device, dims, options.pricing.store, autocast)
            return options.training.priced(table, self.ranks, graph.ops)

        def solved(graph: Capture, table: CostTable, seconds: float, is_draft: bool) -> Plan:
            return solve(
                graph.ops,
                table,
                self.ranks,
                is_draft=is_draft,
                known=known.setdefault(graph.ops.digest, {}),
                time_limit_s=seconds,
                **_asked(options, graph, self.ranks, n_microbatches),
            )

        def usual_s(graph: Capture) -> float:
            return usual_time_s(graph.ops, self.ranks)

        may_open = cut.balance == "cost" and not isinstance(self.costs, CostTable) and not self._names_ops
        limit_s = None if cut.time_limit_s is None else cut.time_limit_s / len(self.counts)
        return refine(self.whole, price, solved, usual_s, may_open=may_open, time_limit_s=limit_s)


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


def _warn_of_unlike(ranks: Cluster) -> None:
    """Warns of devices that can do unlike much and have one speed: all ops are timed as on one of them."""
    can = {d.name: (d.flops_s, d.bandwidth_bytes_s) for d in ranks.devices}
    first, *others = can.values()
    if any(rates != first for rates in others) and len({d.speed for d in ranks.devices}) == 1:
        _logger.warning(
            "the cluster has %s, which can do unlike much, and all of speed %g: every op is timed as on the "
            "one that costs are of; give the others the speed that they have beside it, as in "
            "dataclasses.replace(device, speed=0.5)",
            " and ".join(can),
            ranks.devices[0].speed,
        )


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
    uncounted = _uncounted(planned.costs)
    if uncounted:
        settings["uncounted"] = uncounted
        _logger.warning("the plan rests on costs in which %s", uncounted)
    return dataclasses.replace(planned.plan, settings={**planned.plan.settings, **settings})


def _uncounted(costs: CostTable) -> str:
    """What is not counted in estimates, or guessed in either, on one line; empty where nothing is.

    Calls without a formula, ops that could not run without data, or by themselves where others were timed.
    """
    if costs.source == "estimated":
        told = [note for note in costs.notes if measure.UNCOUNTED in note]
        guessed = [note.partition(":")[0] for note in costs.notes if note.endswith(measure.GUESSED)]
        why = f"could not run without data, each {measure.GUESSED}"
    else:
        told, why = [], "could not be measured, each estimated"
        guessed = [op for op, cost in costs.costs.items() if (costs.source, cost.source) == _FAILED]
    if guessed:
        more = f" and {len(guessed) - 4} more" if len(guessed) > 4 else ""
        listed = f"{', '.join(guessed[:4])}{more}"
        told.append(f"{n_of(len(guessed), 'op')} {why}: {listed}; the notes of the costs say why")
    return "; ".join(told)


_FAILED = "measured", "estimated"
"""The sources of a table and of what could not be measured with the rest of it."""


def _decision_to_text(decided: Decision) -> str:
    plan, table, opened = decided
    return written([plan.to_json(), table.to_dict(), opened])


def _decision_of_text(text: str) -> Decision:
    plan, table, opened = json.loads(text)
    return Plan.from_json(plan), CostTable.from_dict(table), tuple(opened)
