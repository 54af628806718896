"""How many bytes each stage and rank needs: the one set of formulas that solver, simulator and report use.

::

    stage = weights + gradients + optimizer state + in flight × saved + boundary buffers + workspace
    rank  = Σ stages' weights, gradients, optimizer state, each tied parameter once
          + max over its actions of (saved bytes alive + boundary buffers + that action's workspace)

Saved bytes are alive from F until B, or until W where the backward is split. That errs either way: from I to
W a stage holds what its layers with matrices took in and, uncounted, the gradients of what they gave; a stage
that runs again holds nothing. On ranks whose microbatches wait for W, transformer layers, and convolutions
with norms, hold what is counted, linear and ReLU half as much again. Uncounted are copies of the buffers that
a forward writes to: a stage that runs again holds those of each microbatch in flight, as does one whose own
code writes them and has a backward by what it read. Where the bytes of a stage come from is left to
``measure``, keeping to limits to ``solve``.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .errors import InputError
from .presets import ADAM
from .schema import Bytes, Count, Index
from .units import parse_bytes

if TYPE_CHECKING:
    from .costs import CostTable
    from .plans import Plan, StagePlan
    from .schedule import Schedule

__all__ = [
    "RankMemory",
    "StageMemory",
    "memory_limits",
    "plan_memory",
    "rank_memory",
    "stage_memory",
    "tied_bytes",
    "whole_at_once",
]


@dataclasses.dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one stage by what holds them; ``saved_bytes`` is for one microbatch.

    ``boundary_bytes`` is one microbatch's received and sent values, whose buffers live beside the rest.
    """

    weight_bytes: Bytes = 0
    gradient_bytes: Bytes = 0
    optimizer_bytes: Bytes = 0
    saved_bytes: Bytes = 0
    workspace_bytes: Count = 0
    boundary_bytes: Bytes = 0
    in_flight: Index = 1

    @property
    def static_bytes(self) -> int:
        """What is there between steps."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def activation_bytes(self) -> int:
        """Saved for all microbatches in flight."""
        return self.in_flight * self.saved_bytes

    @property
    def total_bytes(self) -> int:
        """The stage's peak."""
        return self.static_bytes + self.activation_bytes + self.boundary_bytes + self.workspace_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank: what stays, and the peak of what comes and goes."""

    static_bytes: int
    peak_activation_bytes: int

    @property
    def total_bytes(self) -> int:
        """The rank's peak."""
        return self.static_bytes + self.peak_activation_bytes


def stage_memory(
    *,
    parameter_bytes: int = 0,
    gradient_bytes: int = 0,
    saved_bytes: int = 0,
    workspace_bytes: int = 0,
    boundary_bytes: int = 0,
    in_flight: int = 1,
    optimizer_bytes_per_parameter_byte: float = ADAM,
) -> StageMemory:
    """The stage's bytes; optimizer state goes with trainable parameters, whose bytes the gradients have.

    A ratio below 0 is of weights and gradients that take less than as the model has them.

    >>> stage_memory(parameter_bytes=100, gradient_bytes=80, saved_bytes=10, in_flight=3).total_bytes
    370
    """
    beside = round(gradient_bytes * optimizer_bytes_per_parameter_byte)
    weights = max(0, parameter_bytes + min(0, beside))
    return StageMemory(
        weight_bytes=weights,
        gradient_bytes=gradient_bytes + parameter_bytes + min(0, beside) - weights,
        optimizer_bytes=max(0, beside),
        saved_bytes=saved_bytes,
        workspace_bytes=workspace_bytes,
        boundary_bytes=boundary_bytes,
        in_flight=in_flight,
    )


def rank_memory(
    schedule: Schedule, stages: Sequence[StageMemory], shared_bytes: Sequence[int] = ()
) -> tuple[RankMemory, ...]:
    """Per rank, over the schedule's action order; the stages' own ``in_flight`` is not used.

    ``shared_bytes`` is per rank what several of its stages count of the same tied parameters. Linear in the
    actions.
    """
    out = []
    for rank, moments in enumerate(schedule.moments):
        own = schedule.stages_of(rank)
        static = sum(stages[s].static_bytes for s in own) - (shared_bytes[rank] if shared_bytes else 0)
        buffers = sum(stages[s].boundary_bytes for s in own)
        saved = [stages[s].saved_bytes for s in own]
        peak = max(
            sum(n * kept for n, kept in zip(alive, saved, strict=True)) + stages[own[x]].workspace_bytes
            for alive, x in moments
        )
        out.append(RankMemory(static, peak + buffers))
    return tuple(out)


def tied_bytes(plan: Plan, placement: Sequence[int] | None = None) -> tuple[int, ...]:
    """Per rank, what its stages together count too often: weights, gradients and optimizer state of ties.

    ``placement`` is the rank of each stage, by default the plan's.
    """
    return tuple(round(n * plan.held_ratio) for n in plan.repeated_bytes(placement))


def _asked_limits(plan: Plan) -> tuple[int | None, ...]:
    """Per rank, the limit that the plan's settings have, a number for all ranks or one for each.

    Raises :class:`InputError` for a list of another length.
    """
    asked = plan.settings.get("memory_limit")
    each = asked if isinstance(asked, (list, tuple)) else [asked] * plan.n_ranks
    if len(each) != plan.n_ranks:
        raise InputError(
            f"memory_limit has {len(each)} entries for {plan.n_ranks} ranks; give one, or one per rank"
        )
    return tuple(None if limit is None else parse_bytes(limit) for limit in each)


def memory_limits(plan: Plan) -> tuple[int | None, ...]:
    """Per rank, the bytes it may use: the lesser of the limit asked for and what its device can use."""
    known = zip(_asked_limits(plan), (d.usable_bytes for d in plan.cluster.devices), strict=True)
    return tuple(min((b for b in pair if b is not None), default=None) for pair in known)


def whole_at_once(
    plan: Plan,
    schedule: Schedule,
    rank: int,
    whole_bytes: Sequence[int],
    kept_bytes: int,
) -> int | None:
    """How many of a rank's stages may have their weights gathered at a time, where replicas hold shards.

    ``whole_bytes`` are the weights of each, ``kept_bytes`` what the rank holds all the time beside: shards,
    their optimizer state, and gradients, which are added up whole until the last backward. None for all, 0
    where the plan's limit has no room for the largest.
    """
    limit = memory_limits(plan)[rank]
    if limit is None:
        return None
    room = limit - kept_bytes - rank_memory(schedule, plan_memory(plan))[rank].peak_activation_bytes
    sizes = sorted(whole_bytes, reverse=True)
    fitting = [n for n in range(len(sizes) + 1) if sum(sizes[:n]) <= room]
    return None if fitting[-1:] == [len(sizes)] else max(fitting, default=0)


def plan_memory(plan: Plan, costs: CostTable | None = None) -> tuple[StageMemory, ...]:
    """Per stage, the bytes a plan says it needs; with op costs closer than the bound a solver can afford.

    Without costs these are the plan's own sums, as the solver counts them: all that is saved, the largest
    workspace, and the buffers. With them, each stage's ops are walked: the microbatch under way peaks where
    saved bytes and workspace together do, and blocks that are run again save theirs only then.
    Values received are held from forward to backward. Beside them lie the next microbatch's arriving, the
    last one's gradients leaving, and for values sent on, their gradients arriving. Where the optimizer's
    step needs more than that, it counts instead. Linear in the ops.
    """
    buffered = _buffers(plan)
    if costs is None:
        return tuple(_as_planned(plan, stage, buffered[stage.index]) for stage in plan.stages)
    training = _is_training(plan)
    out = []
    for stage in plan.stages:
        received = {b.value: b.n_bytes for b in plan.boundaries if stage.index in b.destinations}
        saved = sum(costs[op].saved_bytes for op in stage.ops)
        kept = costs.kept_bytes(stage.ops, received) if training else 0
        peak = costs.peak_bytes(stage.ops, stage.recomputed, training=training)
        if stage.recompute:
            kept, peak = sum(received.values()), peak + sum(received.values())
        elif training:
            peak += kept - saved + stage.held_bytes
            kept += stage.held_bytes - sum(costs[op].saved_bytes for ops in stage.recomputed for op in ops)
        buffers = buffered[stage.index]
        stepping = costs.optimizer_workspace_bytes - stage.in_flight * kept - buffers
        out.append(
            stage_memory(
                parameter_bytes=stage.parameter_bytes,
                gradient_bytes=stage.gradient_bytes,
                saved_bytes=kept,
                workspace_bytes=max(peak - kept, stepping if training else 0),
                boundary_bytes=buffers,
                in_flight=stage.in_flight,
                optimizer_bytes_per_parameter_byte=plan.optimizer_ratio,
            )
        )
    return tuple(out)


def _as_planned(plan: Plan, stage: StagePlan, buffers: int) -> StageMemory:
    return stage_memory(
        parameter_bytes=stage.parameter_bytes,
        gradient_bytes=stage.gradient_bytes,
        saved_bytes=stage.saved_bytes,
        workspace_bytes=stage.workspace_bytes,
        boundary_bytes=buffers,
        in_flight=stage.in_flight,
        optimizer_bytes_per_parameter_byte=plan.optimizer_ratio,
    )


def _is_training(plan: Plan) -> bool:
    return any(stage.backward_s for stage in plan.stages)


def _buffers(plan: Plan) -> Mapping[int, int]:
    """Per stage, twice what it receives, and the gradients that come back to it."""
    out: collections.Counter[int] = collections.Counter()
    training = _is_training(plan)
    for b in plan.boundaries:
        out.update(dict.fromkeys(b.destinations, 2 * b.n_bytes))
        out.update({b.source: b.n_bytes * (b.differentiable and training)})
    return out
