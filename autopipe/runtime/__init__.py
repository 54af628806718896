"""Runs a pipeline's stages: training steps and forwards, in one process or one rank per device.

Deciding the cut is left to ``solve``, generating schedules and wire orders to ``schedule``.
"""

from .rows import mixing
from .runtime import Runtime, StepResult

__all__ = ["Runtime", "StepResult", "mixing"]
