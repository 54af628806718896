"""Runs a pipeline's stages: training steps and forwards, in one process or one rank per device.

Deciding the cut is left to ``solve``, generating schedules and wire orders to ``schedule``.

A room imports only from those above it:

===========  ===============================================================================================
room         what goes there
===========  ===============================================================================================
options      what a runtime is told to do, once and at each call
step_result  what a step gives back
wire         what crosses between ranks, and who they are
data         a batch on its way in and out: microbatches, their weights, who feeds them, outputs joined
reduce       what ranks add up after the last backward
stage        one stage at work: forward, backward whole or in parts, the loss at its end
execute      all actions and messages of one rank, as a list, and what goes through it
files        the files that a checkpoint may be
checkpoint   what a checkpoint holds
weights      whose the weights are
===========  ===============================================================================================

``engine`` builds all of them, ``runner`` runs one call through them; ``save_load`` saves and loads, with
``agreement`` so that all ranks do it alike; ``rebalance`` cuts anew and ``weight_moves`` moves the weights;
``runtime`` and ``upkeep`` are what users meet.
"""

from .data.rows import mixing
from .runtime import Runtime, StepResult

__all__ = ["Runtime", "StepResult", "mixing"]
