"""Runs a pipeline's stages: training steps and forwards, in one process or one rank per device.

Deciding the cut is left to ``solve``, generating schedules and wire orders to ``schedule``.

A room imports only from those above it:

==========  ================================================================================================
room        what goes there
==========  ================================================================================================
options     what a runtime is told to do, once and at each call
given       what a step gives back
wire        what crosses between ranks, and who they are
data        a batch on its way in and out: microbatches, their weights, who feeds them, outputs joined
reduce      what ranks add up after the last backward
stage       one stage at work: forward, backward whole or in parts, the loss at its end
execute     all actions and messages of one rank, as a list, and what goes through it
files       the files that a checkpoint may be
checkpoint  what a checkpoint holds
weights     whose the weights are
==========  ================================================================================================

``engine`` puts them together, ``runner`` to work; ``agreement`` and ``keeper`` save and load on all ranks
alike, ``moving`` moves weights between them; ``runtime`` and ``upkeep`` are what users meet.
"""

from .data.rows import mixing
from .runtime import Runtime, StepResult

__all__ = ["Runtime", "StepResult", "mixing"]
