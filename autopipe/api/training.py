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
from ..hardware import Cluster
from ..presets import held, optimizer_ratio_of, own_bytes, wants_autocast
from ..tracing import Capture

__all__ = ["Training"]

_HOST_BYTES_S = 5e10
"""Memory bandwidth of the host that one rank's optimizer has: assumed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Training:
    """What a caller said of it; ``given`` is the caller's own ratio, which goes before the presets."""

    precision: str | None = None
    optimizer: str = "adam"
    offload: str = "never"
    given: float | None = None

    def __post_init__(self) -> None:
        if self.given is not None and (self.precision, self.optimizer, self.offload) != (
            None,
            "adam",
            "never",
        ):
            raise InputError(
                "optimizer_bytes_per_parameter_byte says what precision, optimizer and offload would; give "
                "it or them"
            )

    @property
    def written(self) -> dict[str, str]:
        """What the plan's settings keep of it."""
        out = {"precision": self.precision or "", "optimizer": self.optimizer, "offload": self.offload}
        return {} if self.given is not None else out

    def ratio(self, graph: OpGraph) -> float:
        """Bytes beside weights and gradients per byte of trained parameter."""
        if self.given is not None:
            return self.given
        return optimizer_ratio_of(graph, self.precision, self.optimizer, self.offload)

    def autocast(self, capture: Capture) -> torch.dtype | None:
        """What forwards are costed under; estimates, on paper, cast everything to it."""
        return torch.bfloat16 if wants_autocast(capture.ops, self.precision) else None

    def priced(self, costs: CostTable, cluster: Cluster, graph: OpGraph) -> CostTable:
        """The costs with the optimizer's step as it will run: on the host, where its state is.

        Per parameter: its gradient crosses to the host and its weight comes back, and the host reads and
        writes what Adam does in fp32, seven passes.
        """
        if self.offload == "never":
            return costs
        device = cluster.devices[0]
        link = measure.link("PCIe5" if "NVIDIA H" in device.name else "PCIe4")
        own = own_bytes(graph)
        parts = held(self.precision or ("fp32" if own >= 4 else "bf16"), self.optimizer)
        crossing = (parts.gradient + parts.weight) / link.bandwidth_bytes_s
        return dataclasses.replace(costs, optimizer_s_per_byte=(crossing + 7 * 4 / _HOST_BYTES_S) / own)
