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
``runtime`` and ``between_steps`` are what users meet.

Where a change goes:

- an option: ``options``, and its words in ``runtime``
- how a batch is cut into rows: ``data.microbatch``; what a microbatch weighs: ``data.weights``
- a kind of action: ``execute.program`` puts it in its place, ``execute.executor`` runs it, ``stage.worker``
  does it
- what ranks must agree on before a step: ``execute.step_agreement``; what they tell one another:
  ``wire.control_messages``
- what crosses between stages: ``wire.boundary``, ``wire.channel``; over what it goes: ``wire.group``,
  ``wire.host_links``
- how a lost rank is noticed: ``wire.failure``, ``wire.lost_ranks``
- what is summed over ranks: ``reduce.ties``, ``reduce.data_parallel``
- what a save holds: ``checkpoint.training_state``; files that can be loaded: ``checkpoint.loading``
"""

from .data.rows import mixing
from .options import Progress
from .runtime import Runtime, StepResult

__all__ = ["Progress", "Runtime", "StepResult", "mixing"]
