"""Splits and saves in others' terms: torch's stages and checkpoints, torchtitan's hook, lists of layers.

Running what they make is left to those tools; torch's schedules as CSV are in ``schedule``.
"""

from typing import TYPE_CHECKING, Any

from .layer_specs import LayerChain, from_layer_specs
from .megatron_layout import from_megatron_layout, to_megatron_layout
from .tensor_chain import Relay, relays
from .torch_stages import gather, to_torch_stages
from .torchtitan import torchtitan_pipelining

if TYPE_CHECKING:
    from .checkpoints import dcp_reader, to_dcp

__all__ = [
    "LayerChain",
    "Relay",
    "dcp_reader",
    "from_layer_specs",
    "from_megatron_layout",
    "gather",
    "relays",
    "to_dcp",
    "to_megatron_layout",
    "to_torch_stages",
    "torchtitan_pipelining",
]


def __getattr__(name: str) -> Any:
    if name not in ("dcp_reader", "to_dcp"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import checkpoints  # torch.distributed.checkpoint imports slowly

    return getattr(checkpoints, name)
