"""Runs a pipeline's stages: training steps and forwards, in one process or one rank per device.

Deciding the cut is left to ``solve``, generating schedules and wire orders to ``schedule``.

The rooms, in the order of a step: ``data`` cuts the batch, ``stage`` runs an action, ``execute`` all actions
of a rank, ``wire`` brings what crosses, ``reduce`` adds up over ranks, ``keep`` saves; ``engine``
puts them together, ``runner`` to work, ``runtime`` and ``upkeep`` are what users meet.
"""

from .data.rows import mixing
from .runtime import Runtime, StepResult

__all__ = ["Runtime", "StepResult", "mixing"]
