"""Splits and saves in other tools' terms: torch's stages and checkpoints, DeepSpeed's and Megatron's layers.

Running what they make is left to those tools; torch's schedules as CSV are in ``schedule``.
"""

from .checkpoints import to_dcp
from .layout import from_megatron_layout, to_megatron_layout
from .relay import Relay, relays
from .specs import LayerChain, from_layer_specs
from .torchs import gather, to_torch_stages

__all__ = [
    "LayerChain",
    "Relay",
    "from_layer_specs",
    "from_megatron_layout",
    "gather",
    "relays",
    "to_dcp",
    "to_megatron_layout",
    "to_torch_stages",
]
