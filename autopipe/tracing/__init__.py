"""Capture any ``nn.Module`` as an fx graph and an op graph, by running it once and recording.

``capture`` runs the rooms below in order. What the ops cost is left to ``measure``, cutting the graph to
``solve`` and ``stages``. A room imports only from those above it:

=========  =================================================================================================
room       what goes there
=========  =================================================================================================
members    the modules, parameters and buffers of a model, listed and found by their paths
inputs     a call's arguments: their structure, names, examples, rows of several samples, caches left out
calls      the vocabulary of a recording: a call, a guard, the region it ran in, what torch's functions do
state      the model as it was: buffers, attributes, what its code reaches, random state; copied, put back
code       the model's Python: where it is, which modules and functions stay whole, what they keep
values     what a recording knows of tensors and numbers: the call behind each, what Python asks of them
record     one run of the model, recorded
patches    what is patched in torch and Python for that time
runs       the runs of a capture: in both modes, recorded and not, and what of the model they stand on
graphs     what recordings become: forms under common names, fx graphs, generated modules, the op graph
sizes      which input sizes may vary, found by running a recording at others; rules about sizes
rows       whether rows of a batch meet, found by running a recording on others; what must run on all of them
referee    recordings held against the model on other data, in both modes, with gradients and state
=========  =================================================================================================

``session`` in ``runs`` decides what to record again; ``forms`` makes a capture's forms of recordings,
``validation`` holds them against the model, ``forms_by_size`` and ``new_forms`` add others; ``new_kinds``
adds captures for other calls and states.

Where a change goes:

- a function of torch that needs care of its own: ``calls.functions``
- what is patched while a model runs: ``patches.patches``; questions whose answers are watched:
  ``patches.queries``
- a guard on a size: ``sizes.guards``; which sizes are tried, which formulas fit: ``sizes.explore``,
  ``sizes.dims``
- a question about values that each call answers for itself: ``values.branches``, ``graphs.questions``
- which modules are leaves: ``code.leaves``; other code that stays whole: ``code.opaque``,
  ``record.opaque_calls``
- state that is copied and put back: ``state.reach``; state whose change is noticed: ``state.readers``
- what is asked about rows: ``rows.analysis``; other data to compare on: ``state.redraw``

Each room's own docstring names its modules.
"""

from .capture import capture
from .captured import Capture
from .state.example_data import device_of
from .state.state import preserved

__all__ = ["Capture", "capture", "device_of", "preserved"]
