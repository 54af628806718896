"""What a plan is made of: stages, what crosses between them or is tied, bounds, what else was tried."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ..schema import Bytes, Index, Line, Name, Seconds

__all__ = ["Boundary", "Bounds", "Candidate", "StagePlan", "Tie"]


@dataclasses.dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage: a convex piece of the op graph, and what one microbatch of it should cost.

    Attributes
    ----------
    index, rank: the stage's number from 0 and the rank that holds it.
    ops: the ops it computes, in program order, clones included.
    clones: those of ``ops`` that another stage computes too, because that is cheaper than sending them.
    recompute: drop saved activations after forward and run forward again before backward.
    recomputed: otherwise, the blocks whose saved activations are dropped, each a tuple of ops that are run
        again together when backward comes to them.
    forward_s, backward_s, backward_input_s, backward_weight_s: per microbatch, recompute included in
        backward, communication left out.
    parameter_bytes: weights held, tied copies included (buffers too).
    gradient_bytes: of the parameters that require a gradient.
    saved_bytes: kept for backward, per microbatch in flight; what blocks hold to run again included.
    held_bytes: that part of ``saved_bytes`` which blocks hold to run again.
    n_trained: how many parameters require a gradient: an optimizer takes time for each, whatever its size.
    workspace_bytes: peak above the rest while an action runs.
    in_flight: most microbatches alive at once under the plan's schedule.
    memory_bytes: predicted peak: weights, gradients, optimizer state, in flight × saved, workspace, buffers.
    """

    index: Index
    rank: Index
    ops: tuple[Name, ...]
    clones: tuple[Name, ...] = ()
    recompute: bool = False
    forward_s: Seconds = 0.0
    backward_s: Seconds = 0.0
    backward_input_s: Seconds = 0.0
    backward_weight_s: Seconds = 0.0
    parameter_bytes: Bytes = 0
    gradient_bytes: Bytes = 0
    saved_bytes: Bytes = 0
    workspace_bytes: Bytes = 0
    in_flight: Index = 1
    memory_bytes: Bytes = 0
    recomputed: tuple[tuple[Name, ...], ...] = ()
    held_bytes: Bytes = 0
    n_trained: Index = 0

    @property
    def seconds(self) -> float:
        """Forward and backward of one microbatch."""
        return self.forward_s + self.backward_s


@dataclasses.dataclass(frozen=True, slots=True)
class Boundary:
    """A value that crosses from the stage that computes it to later stages that use it.

    ``n_bytes`` is per microbatch and direction; ``differentiable`` values send a gradient back.
    """

    value: Name
    source: Index
    destinations: tuple[Index, ...]
    n_bytes: Bytes
    differentiable: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Tie:
    """A parameter that several stages use: its gradients are summed once per step.

    ``mode`` is ``sync`` (a copy in each stage, an all-reduce of ``n_bytes`` costing ``seconds`` per step)
    or ``colocate`` (all users in one stage, or stages of one rank; no traffic).
    """

    parameter: Name
    names: tuple[Name, ...]
    stages: tuple[Index, ...]
    n_bytes: Bytes
    mode: Literal["sync", "colocate"] = "sync"
    seconds: Seconds = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """What no plan can beat, in the cost model the plan was solved in.

    ``bottleneck_s`` is the plan's largest stage load per microbatch (compute + exposed communication) and
    ``bottleneck_lower_s`` a certified lower bound on it; ``step_lower_s`` bounds the step time. ``proved``
    says that the bottleneck bound is met.
    """

    bottleneck_s: Seconds
    bottleneck_lower_s: Seconds
    step_lower_s: Seconds
    proved: bool

    @property
    def gap(self) -> float:
        """How far above the lower bound the bottleneck may be, relative; 0 when proved."""
        if self.proved:
            return 0.0
        if self.bottleneck_lower_s <= 0:
            return float("inf")
        return self.bottleneck_s / self.bottleneck_lower_s - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One alternative the solver simulated: what it was, its step time and the memory of its fullest rank."""

    label: Line
    schedule: Name
    n_stages: Index
    n_microbatches: Index
    step_s: Seconds
    memory_bytes: Bytes
    feasible: bool = True
