"""Capture any ``nn.Module`` as an fx graph and an op graph, by running it once and recording.

``capture`` runs the rooms below in order. What the ops cost is left to ``measure``, cutting the graph to
``solve`` and ``stages``. A room imports only from those above it:

=========  =================================================================================================
room       what goes there
=========  =================================================================================================
inputs     a call's arguments: their structure, names, examples, rows of several samples, caches left out
calls      the vocabulary of a recording: a call, a guard, the region it ran in, what torch's functions do
record     one run being recorded: leaves, patches, checks, tracked numbers, the state put back afterwards
graphs     what recordings become: forms under common names, fx graphs, generated modules, the op graph
sizes      which input sizes may vary, found by running a recording at others; rules about sizes
referee    recordings held against the model on other data, in both modes, with gradients and state
=========  =================================================================================================
"""

from .capture import capture
from .captured import Capture
from .record.given import device_of
from .record.state import preserved

__all__ = ["Capture", "capture", "device_of", "preserved"]
