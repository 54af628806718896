"""Capture any ``nn.Module`` as an fx graph and an op graph, by running it once and recording.

What the ops cost is left to ``measure``, cutting the graph to ``solve`` and ``stages``.
"""

from .capture import Capture, capture
from .session import device_of

__all__ = ["Capture", "capture", "device_of"]
