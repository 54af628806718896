"""How a model will be trained, as far as a plan must know it: precision, optimizer, what is offloaded.

What each preset holds is left to ``presets``.
"""

from __future__ import annotations

import dataclasses

import torch

from .. import measure
from ..costs import CostTable
from ..errors import InputError
from ..graph import OpGraph
from ..hardware import Cluster, Link
from ..presets import bytes_per_parameter, optimizer_ratio_of, own_bytes, wants_autocast
from ..tracing import Capture

__all__ = ["Training"]

_HOST_BYTES_S = 5e10
"""Memory bandwidth of the host that one rank's optimizer has: assumed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a caller said of it; their own ratio, where they gave one, goes before the presets."""

    precision: str | None = None
    optimizer: str = "adam"
    offload: str = "never"
    optimizer_bytes_per_parameter_byte: float | None = None

    def __post_init__(self) -> None:
        presets = self.precision, self.optimizer, self.offload
        if self.has_own_ratio and presets != (None, "adam", "never"):
            raise InputError(
                "optimizer_bytes_per_parameter_byte says what precision, optimizer and offload would; give "
                "it or them"
            )

    @property
    def has_own_ratio(self) -> bool:
        """Whether the caller said what optimizer and precision keep, in place of the presets."""
        return self.optimizer_bytes_per_parameter_byte is not None

    @property
    def moves_activations(self) -> bool:
        """Whether what forwards keep for backward is in the host's memory meanwhile."""
        return self.offload in ("activations", "all")

    @property
    def written(self) -> dict[str, str]:
        """What the plan's settings keep of it."""
        out = {"precision": self.precision or "", "optimizer": self.optimizer, "offload": self.offload}
        return {} if self.has_own_ratio else out

    def ratio(self, graph: OpGraph) -> float:
        """Bytes beside weights and gradients per byte of trained parameter."""
        if self.optimizer_bytes_per_parameter_byte is not None:
            return self.optimizer_bytes_per_parameter_byte
        return optimizer_ratio_of(graph, self.precision, self.optimizer, self.offload)

    def autocast(self, capture: Capture) -> torch.dtype | None:
        """What forwards are costed under; estimates, on paper, cast everything to it."""
        return torch.bfloat16 if wants_autocast(capture.ops, self.precision) else None

    def priced(self, costs: CostTable, cluster: Cluster, graph: OpGraph) -> CostTable:
        """The costs of what is offloaded, as it will run.

        The optimizer's step runs on the host, where its state is. Per parameter its gradient crosses to the
        host and its weight comes back, and the host reads and writes what Adam does in fp32, seven passes.
        """
        link = _host_link(cluster)
        if self.offload in ("optimizer", "all"):
            own = own_bytes(graph)
            parts = bytes_per_parameter(self.precision or ("fp32" if own >= 4 else "bf16"), self.optimizer)
            crossing = (parts.gradient + parts.weight) / link.bandwidth_bytes_s
            costs = dataclasses.replace(costs, optimizer_s_per_byte=(crossing + 7 * 4 / _HOST_BYTES_S) / own)
        if self.moves_activations:
            return costs if costs.offloaded else _offloaded(costs, link)
        if costs.offloaded:
            raise InputError(
                "the cost table is of offloaded activations; plan with offload='activations' too, or give "
                "the table it was made from"
            )
        return costs


def _host_link(cluster: Cluster) -> Link:
    """The way to the host's memory of the device that has the slowest."""
    known = measure.link("PCIe4")
    rates = [d.host_bandwidth_bytes_s or known.bandwidth_bytes_s for d in cluster.devices]
    return dataclasses.replace(known, bandwidth_bytes_s=min(rates))


def _offloaded(costs: CostTable, link: Link) -> CostTable:
    """The costs where what ops save for backward is in the host's memory meanwhile.

    It crosses once each way, in order with the device's work (a backward in two parts brings it to both). An
    op's own is on the device while the op runs, and so are the values that a stage received, throughout.
    """
    moved = {}
    for name, cost in costs.costs.items():
        crossing_s = link.seconds(cost.saved_bytes)
        is_split = bool(cost.backward_input_s and cost.backward_weight_s)
        moved[name] = dataclasses.replace(
            cost,
            forward_s=cost.forward_s + crossing_s,
            backward_s=cost.backward_s + crossing_s,
            backward_input_s=cost.backward_input_s + crossing_s,
            backward_weight_s=cost.backward_weight_s + crossing_s * is_split,
            saved_bytes=0,
            saved_values=(),
            workspace_bytes=cost.workspace_bytes + cost.saved_bytes,
            backward_workspace_bytes=cost.backward_workspace_bytes + cost.saved_bytes,
        )
    return dataclasses.replace(costs, costs=moved, offloaded=True)
