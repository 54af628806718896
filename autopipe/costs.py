"""What each op costs: seconds, bytes and FLOPs, with where each figure came from.

Measuring and estimating them is left to ``measure``; what they imply for a plan to ``solve``.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from .errors import InputError
from .schema import Bytes, Count, Line, Name, Positive, Real, Seconds, Share, build, differs, load, versioned
from .shown import Shown

__all__ = ["TIMES", "CostTable", "Degrees", "OpCost"]

VERSION = 5
Source = Literal["measured", "estimated", "given"]


@dataclasses.dataclass(frozen=True, slots=True)
class OpCost:
    """Cost of one op for one microbatch.

    Attributes
    ----------
    forward_s: seconds of the forward.
    backward_s: seconds of the whole backward (B); 0 where no gradient flows.
    backward_input_s, backward_weight_s: its input (I) and weight (W) parts where a schedule wants them
        apart; they sum to about ``backward_s``.
    saved_bytes: kept from forward to backward, each storage once, parameters left out.
    workspace_bytes: the forward's peak above what is kept for backward, values that nothing keeps included.
    backward_workspace_bytes: the backward's peak above what was kept for it, gradients in and out included.
    flops: of the forward.
    source: where the figures came from.
    spread: relative half-width of the seconds: the measured quartile spread, or the estimate's interval.
    saved_values: ops and inputs whose values are among what it keeps, whether or not ``saved_bytes`` counts
        them: a storage that several ops keep is counted at the first of them in program order, and one that
        a movable op made at that op, which stages may run again.
    host_forward_s, host_backward_s: what the host takes to launch either, on a device that works on while
        the host goes on; the other seconds are then the device's alone. Neither waits for the other, so ops
        that run one after another take as long as the slower of the two does for all of them
        (:attr:`paced`). 0 where host and device are one.
    """

    forward_s: Seconds = 0.0
    backward_s: Seconds = 0.0
    backward_input_s: Seconds = 0.0
    backward_weight_s: Seconds = 0.0
    saved_bytes: Bytes = 0
    workspace_bytes: Bytes = 0
    backward_workspace_bytes: Bytes = 0
    flops: Count = 0
    source: Source = "given"
    spread: Share = 0.0
    saved_values: tuple[Name, ...] = ()
    host_forward_s: Seconds = 0.0
    host_backward_s: Seconds = 0.0

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward_s + self.backward_s

    @property
    def host_s(self) -> float:
        """What the host takes to launch both."""
        return self.host_forward_s + self.host_backward_s

    @property
    def paced(self) -> OpCost:
        """The same as it runs: at the host's pace where launching takes longer than the device does."""
        if self.host_s <= self.seconds:
            return self
        slower = self.host_backward_s / self.backward_s if self.backward_s else 1.0
        return dataclasses.replace(
            self,
            forward_s=self.host_forward_s,
            backward_s=self.host_backward_s,
            backward_input_s=self.backward_input_s * slower,
            backward_weight_s=self.backward_weight_s * slower,
        )

    def scaled(self, factor: float) -> OpCost:
        """The same cost with every time multiplied by ``factor``."""
        return dataclasses.replace(self, **{t: getattr(self, t) * factor for t in TIMES})


TIMES = (
    "forward_s",
    "backward_s",
    "backward_input_s",
    "backward_weight_s",
    "host_forward_s",
    "host_backward_s",
)
"""The fields of :class:`OpCost` that are seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Degrees:
    """Over how many ranks each stage's work is spread beside the pipeline; costs are of one of those ranks.

    So far every degree is 1, and others are refused: stages are all that is planned. Replicas of a whole
    pipeline need none; a mesh gives them to the runtime.
    """

    data: int = 1
    tensor: int = 1
    expert: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "expert", "context"):
            if getattr(self, name) != 1:
                raise InputError(
                    f"the {name} parallel degree is {getattr(self, name)!r}; models are split into stages "
                    "alone, so it must be 1"
                )


@dataclasses.dataclass(frozen=True)
class CostTable(Shown):
    """The cost of every op of a graph at given input dims on one kind of device.

    Attributes
    ----------
    costs: op name → cost; inputs, sizes and parts of tuples are free. What a solve or an explanation is
        given must have all other ops: those it lacks are refused.
    dims: the input dims' values the costs hold at (one microbatch).
    device: what they were measured on or estimated for, such as ``"NVIDIA H200"``.
    source: ``measured``, ``estimated`` or ``given``.
    residual: whole-model time over the sum of the op costs, minus one, before calibration; None if not run.
    optimizer_s_per_byte, optimizer_s_per_tensor: seconds of the optimizer step, for each byte of the
        parameters and beside that for each parameter, however small.
    start_s: seconds that a step's beginning takes: the host takes its batch in, and the first microbatches
        find nothing of theirs in any cache and gradients yet to be made.
    jitter_s: how unlike the times are that the same work takes: their variance, in square seconds for each
        second of it.
    versions: torch and library versions the figures depend on.
    notes: what went wrong or was made up on the way, a line each.
    optimizer_workspace_bytes: what an optimizer step needs above weights, gradients and state.
    degrees: over how many ranks each op is spread.
    alone: the seconds with no other rank at work on the machine, over those given, which are with as many
        busy as there will be.
    ops: whose costs these are (``OpGraph.ops_digest``); "" where they are given by hand.
    offloaded: what ops save is in the host's memory from forward to backward, which the seconds count.
    """

    costs: Mapping[Name, OpCost]
    dims: Mapping[Name, Count] = dataclasses.field(default_factory=dict)
    device: Line = ""
    source: Source = "given"
    residual: Real | None = None
    optimizer_s_per_byte: Seconds = 0.0
    versions: Mapping[Name, Line] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    optimizer_workspace_bytes: Bytes = 0
    degrees: Degrees = Degrees()
    optimizer_s_per_tensor: Seconds = 0.0
    start_s: Seconds = 0.0
    alone: Positive = 1.0
    offloaded: bool = False
    jitter_s: Seconds = 0.0
    ops: Line = ""

    def __getitem__(self, op: str) -> OpCost:
        return self.costs.get(op, _FREE)

    def total(self, ops: Iterable[str]) -> OpCost:
        """What several ops that run one after another cost: sums, except workspaces, which are maxima.

        Their seconds are those of the slower of device and host.
        """
        items = [self[op] for op in ops]
        sums = (*TIMES, "saved_bytes", "flops")
        peaks = ("workspace_bytes", "backward_workspace_bytes")
        totals: dict[str, Any] = {f: sum(getattr(c, f) for c in items) for f in sums}
        totals |= {f: max((getattr(c, f) for c in items), default=0) for f in peaks}
        return OpCost(**totals, source=self.source).paced

    def kept_bytes(self, ops: Sequence[str], received: Mapping[str, int]) -> int:
        """Bytes a stage of ``ops`` keeps per microbatch: what they save, and what it received.

        ``received`` has the bytes of each value that comes from another stage. One that an op of the stage
        keeps may be counted in its ``saved_bytes`` already, if no earlier op of the model keeps it too.
        """
        first: dict[str, str] = {}
        for op, cost in self.costs.items():
            for value in cost.saved_values:
                first.setdefault(value, op)
        own = set(ops)
        rest = sum(n for value, n in received.items() if first.get(value) not in own)
        return sum(self[op].saved_bytes for op in ops) + rest

    def peak_bytes(
        self, ops: Sequence[str], recomputed: Sequence[Sequence[str]] = (), *, training: bool = True
    ) -> int:
        """Peak of one microbatch's forward and backward through ``ops``, in order, above what lies still.

        Forward keeps each op's saved bytes in turn, backward gives them up in reverse; on top comes what the
        op under way needs. ``recomputed`` blocks keep theirs only while backward is in them. Linear in the
        ops.
        """
        block = {op: x for x, row in enumerate(recomputed) for op in row}
        redone = [0] * len(recomputed)
        kept = peak = 0
        for op in ops:
            cost = self[op]
            saved = cost.saved_bytes if training else 0
            workspace = max(cost.workspace_bytes, cost.backward_workspace_bytes if training else 0)
            if op in block:
                redone[block[op]] += saved
                peak = max(peak, kept + redone[block[op]] + workspace)
            else:
                kept += saved
                peak = max(peak, kept + workspace)
        return peak

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and numbers, for JSON."""
        return {
            "version": VERSION,
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "costs"},
            "dims": dict(self.dims),
            "versions": dict(self.versions),
            "notes": list(self.notes),
            "degrees": dataclasses.asdict(self.degrees),
            "costs": {op: dataclasses.asdict(cost) for op, cost in self.costs.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], what: str = "the cost table") -> CostTable:
        """The inverse of :meth:`to_dict`.

        Raises :class:`StoreError`, with the path to the fault, for anything that is not one's ``to_dict``.
        """
        table = build(cls, versioned(data, VERSION, what, "cost table"), what)
        differs(data, table.to_dict(), what)
        return table

    @classmethod
    def read(cls, path: str | pathlib.Path) -> CostTable:
        """A table from its file. Raises :class:`StoreError` for one that holds none."""
        return cls.from_dict(load(path, "the cost table"), f"the cost table {path}")


_FREE = OpCost()
