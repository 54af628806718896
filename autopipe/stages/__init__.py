"""Stages: one generated ``nn.Module`` per stage of a plan, and their parity with the model.

Recording the graph is left to ``tracing``, deciding the cut to ``solve``, running stages on many ranks to
``runtime``.
"""

from .build import build, renewed
from .losses import find_loss, own_loss
from .stage import Section, Stage
from .verify import Parity, relative_error, run_stages, run_values, tensors_of, undisturbed, verify

__all__ = [
    "Parity",
    "Section",
    "Stage",
    "build",
    "find_loss",
    "own_loss",
    "relative_error",
    "renewed",
    "run_stages",
    "run_values",
    "tensors_of",
    "undisturbed",
    "verify",
]
