"""Splits in other tools' terms: torch's own pipeline stages, a chain of layers, Megatron's layout string.

Running what they make is left to those tools; torch's schedules as CSV are in ``schedule``.
"""

from .layout import from_megatron_layout, to_megatron_layout
from .relay import Relay, relays
from .torchs import gather, to_torch_stages

__all__ = ["Relay", "from_megatron_layout", "gather", "relays", "to_megatron_layout", "to_torch_stages"]
