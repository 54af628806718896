"""Splits in other tools' terms: torch's pipeline stages, DeepSpeed's layers, Megatron's layout string.

Running what they make is left to those tools; torch's schedules as CSV are in ``schedule``.
"""

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
    "to_megatron_layout",
    "to_torch_stages",
]
