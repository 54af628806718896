"""Cuts a pipeline anew: solved again from what its stages were measured to take, between two steps.

Measuring is left to ``report``, moving weights to ``weight_moves``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..arguments import brief, number, whole
from ..costs import CostTable, OpCost
from ..errors import AutopipeError, InputError
from ..graph import OpGraph
from ..plans import Plan, check_between, check_plan
from ..simulator import Report, StageReport, simulate
from ..solve import options_of, solve
from ..stages import Stage, build
from .agreement import Agreement
from .weight_moves import move_weights

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Cutter", "gain", "plan_again"]

NO_PLAN = "no plan: "
"""What the first rank tells the others in the place of a plan."""


def _measured(stage: StageReport) -> tuple[float | None, float | None]:
    """Seconds of a microbatch's forward and whole backward; None where there was none."""
    split = [stage.measured[part] for part in "IW" if part in stage.measured]
    return stage.measured.get("F"), stage.measured.get("B", sum(split) if split else None)


def as_measured(costs: CostTable, plan: Plan, stages: Sequence[StageReport]) -> CostTable:
    """The costs with the times of each stage's ops multiplied by what the stage took over what they sum to.

    Backward seconds that no op was thought to have (a block was thawed) are laid on the stage's ops as their
    forwards are.
    """
    scaled: dict[str, OpCost] = dict(costs.costs)
    for planned, stage in zip(plan.stages, stages, strict=True):
        speed = plan.cluster.devices[plan.placement[planned.index]].speed
        again = {op for block in planned.recomputed for op in block}
        again = set(planned.ops) if planned.recompute else again
        ops = {op: costs[op] for op in planned.ops if op in costs.costs}
        total = costs.total(ops)
        forward_s, backward_s = total.forward_s / speed, total.backward_s / speed
        took_s, back_s = _measured(stage)
        forward = took_s / forward_s if took_s is not None and forward_s else 1.0
        if back_s is not None:
            back_s = max(0.0, back_s - forward * sum(ops[op].forward_s for op in again & {*ops}) / speed)
        backward = back_s / backward_s if back_s is not None and backward_s else 1.0
        thawed = back_s / forward_s if back_s is not None and forward_s and not backward_s else 0.0
        for op, cost in ops.items():
            scaled[op] = dataclasses.replace(
                cost,
                forward_s=cost.forward_s * forward,
                backward_s=cost.backward_s * backward + cost.forward_s * thawed,
                backward_input_s=cost.backward_input_s * backward,
                backward_weight_s=cost.backward_weight_s * backward,
                host_forward_s=cost.host_forward_s * forward,
                host_backward_s=cost.host_backward_s * backward,
            )
    return dataclasses.replace(costs, costs=scaled)


def gain(report: Report, plan: Plan) -> float:
    """How many times faster a step is predicted to be under ``plan`` than with the stages as measured."""
    stages = []
    for planned, stage in zip(report.plan.stages, report.stages, strict=True):
        took_s, back_s = _measured(stage)
        back_s = planned.backward_s if back_s is None else back_s
        ratio = back_s / planned.backward_s if planned.backward_s else 1.0
        stages.append(
            dataclasses.replace(
                planned,
                forward_s=planned.forward_s if took_s is None else took_s,
                backward_s=back_s,
                backward_input_s=planned.backward_input_s * ratio,
                backward_weight_s=planned.backward_weight_s * ratio,
            )
        )
    return simulate(dataclasses.replace(report.plan, stages=tuple(stages))).step_s / simulate(plan).step_s


def plan_again(
    ops: OpGraph,
    costs: CostTable,
    plan: Plan,
    *,
    speeds: Mapping[int, float] | None = None,
    time_limit_s: float | None = None,
) -> Plan:
    """The best plan for these costs, under the settings, ranks, schedule and microbatches of ``plan``.

    ``speeds`` are those of ranks whose device is slower or faster than was thought.
    """
    devices = tuple(
        dataclasses.replace(device, speed=device.speed * (speeds or {}).get(rank, 1.0))
        for rank, device in enumerate(plan.cluster.devices)
    )
    cluster = dataclasses.replace(plan.cluster, devices=devices)
    made = solve(ops, costs, cluster, time_limit_s=time_limit_s, **options_of(plan))
    return dataclasses.replace(made, settings={**plan.settings, **made.settings})


STAYS = "graph_digest", "n_ranks", "n_microbatches", "schedule"
"""What of a plan is to be as it was when a pipeline is cut anew."""


def _cut_of(plan: Plan) -> object:
    """All of a plan that ranks are to have alike."""
    stages = [(stage.ops, stage.recompute, stage.recomputed) for stage in plan.stages]
    return [getattr(plan, what) for what in STAYS], plan.placement, stages


def _unfit(before: Plan, after: Plan) -> str:
    """Why a pipeline cannot go on under another plan; empty where it can."""
    for what in STAYS:
        was, now = getattr(before, what, None), getattr(after, what, None)
        if was != now:
            return f"the pipeline runs with {what} {was} and the plan is for {now}; it must be the same"
    return ""


class Cutter:
    """Cuts one rank's part of a pipeline anew, together with the others.

    ``costs`` are what each op was thought to take; ``adopt`` is told of every new plan and its stages.
    """

    def __init__(
        self, engine: Engine, costs: CostTable | None, adopt: Callable[[Plan, tuple[Stage, ...]], object]
    ) -> None:
        self._engine, self._costs, self._adopt = engine, costs, adopt

    def check(
        self,
        plan: Any,
        optimizers: Mapping[str, Any],
        *,
        least_gain: Any,
        speeds: Any,
        time_limit_s: Any,
    ) -> None:
        """Raise :class:`InputError` for what :meth:`Runtime.rebalance` cannot be given."""
        n_ranks = self._engine.plan.n_ranks
        if plan is not None:
            check_plan(plan)
            if plan.graph_digest == self._engine.plan.graph_digest:
                check_between(plan, self._engine.capture.ops)
        number("least_gain", least_gain)
        if time_limit_s is not None:
            number("time_limit_s", time_limit_s, most=1e9, unit="seconds")
        if not isinstance(speeds, (Mapping, type(None))):
            raise InputError(
                f"speeds is {brief(speeds)}; it must be a dict of rank to factor, such as {{0: 2.0}}"
            )
        for rank, factor in (speeds or {}).items():
            whole("a rank in speeds", rank, 0, n_ranks - 1)
            number(f"speeds[{rank}]", factor, above=True, most=1e24)
        for name, optimizer in optimizers.items():
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise InputError(
                    f"{name} is {brief(optimizer)}; rebalance() takes optimizers and moves their state"
                )

    def cut(
        self,
        by: Plan | Report,
        optimizers: Mapping[str, torch.optim.Optimizer],
        *,
        least_gain: float,
        speeds: Mapping[int, float] | None,
        time_limit_s: float | None,
    ) -> bool:
        """See :meth:`Runtime.rebalance`: to a given plan, or by what a report says."""
        engine, costs = self._engine, self._costs
        draft = ""
        if engine.rank == 0 and Agreement(engine).replica.index == 0:
            draft = (
                by.to_json() if isinstance(by, Plan) else self._draft(by, least_gain, speeds, time_limit_s)
            )
        text = self._settle(draft)
        if not text:
            return False
        if text.startswith(NO_PLAN):
            raise InputError(text.removeprefix(NO_PLAN))
        told = Plan.from_json(text)
        plan = by if isinstance(by, Plan) else told
        self._check_same(plan, told)
        fault = _unfit(engine.plan, plan)
        if fault:
            raise InputError(fault)
        if isinstance(by, Report) and costs is not None and by.n_steps:
            costs = as_measured(costs, engine.plan, by.stages)
        stages = build(engine.capture, plan)
        engine.written.check()
        if engine.peers is not None:
            move_weights(engine, engine.peers, stages, optimizers)
        engine.recut(plan, stages)
        self._costs = costs
        self._adopt(plan, stages)
        return True

    def _draft(
        self,
        report: Report,
        least_gain: float,
        speeds: Mapping[int, float] | None,
        time_limit_s: float | None,
    ) -> str:
        """A plan for what the stages were measured to take; empty where it would gain too little."""
        engine = self._engine
        if self._costs is None or not report.n_steps:
            lacks = "no step was run" if self._costs else "the pipe is of a given plan, without costs"
            return f"{NO_PLAN}there is nothing to plan from: {lacks}; pass plan="
        costs = as_measured(self._costs, engine.plan, report.stages)
        try:
            made = plan_again(
                engine.capture.ops, costs, engine.plan, speeds=speeds, time_limit_s=time_limit_s
            )
        except AutopipeError as error:
            return f"{NO_PLAN}no other plan was found: {error}"
        return made.to_json() if gain(report, made) >= least_gain else ""

    def _settle(self, draft: str) -> str:
        """What rank 0 of the first replica drafted, on every rank of all: replicas hold the same stages."""
        engine = self._engine
        text = Agreement(engine).as_first(draft) if engine.rank == 0 else draft
        return text if engine.peers is None else engine.peers.share(text, 0)

    def _check_same(self, given: Plan, told: Plan) -> None:
        """Raise :class:`InputError` on every rank where one was given another plan than the first was."""
        engine = self._engine
        differs = _cut_of(given) != _cut_of(told)
        if engine.peers is not None:
            differs = engine.peers.any(differs)
        if Agreement(engine).any(differs):
            raise InputError(
                "ranks were given unlike plans to cut to; give every rank, and every replica, the same: "
                "autopipe.Plan.from_json of one file, say"
            )
