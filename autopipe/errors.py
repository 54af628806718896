"""Every error autopipe raises, as one tree.

Messages state the fact with its values, the place, and the remedy; raising them is left to the rooms
that find the fault.

::

    AutopipeError
    ├── ModelError          the model itself failed on the inputs it was given
    ├── CaptureError        the model cannot be recorded as a graph
    ├── InputError          arguments of a call do not fit: structure, dtype, size or range
    ├── CostError           an op's cost cannot be measured or estimated
    ├── StoreError          a profile, plan or cluster file is stale, damaged or of another version
    ├── PlanError           a plan cannot be made, or does not fit the model it is used with
    │   └── InfeasibleError no plan meets the limits; says the smallest change that would
    │       └── UndecidedError  no plan was found in the time, and none was ruled out
    ├── ScheduleError       a schedule is malformed: an action missing, out of order or deadlocked
    ├── VerificationError   the pipeline and the model disagree
    ├── StaleError          weights that another rank trains were asked for here
    └── StepError           a rank failed, died or stalled during a step
"""

from __future__ import annotations

__all__ = [
    "AutopipeError",
    "CaptureError",
    "CostError",
    "InfeasibleError",
    "InputError",
    "ModelError",
    "PlanError",
    "ScheduleError",
    "StaleError",
    "StepError",
    "StoreError",
    "UndecidedError",
    "VerificationError",
]


class AutopipeError(Exception):
    """Base of every error autopipe raises."""


class ModelError(AutopipeError):
    """The model's own forward or backward raised; its error is the ``__cause__``."""


class CaptureError(AutopipeError):
    """The model cannot be recorded as a graph; names the file, the line and what stood in the way."""


class InputError(AutopipeError, ValueError):
    """Arguments given to a call do not fit: wrong structure, dtype, size or range."""


class CostError(AutopipeError):
    """An op's cost cannot be measured or estimated."""


class StoreError(AutopipeError):
    """A saved file is stale, damaged or written by another version, and was not used."""


class PlanError(AutopipeError):
    """A plan cannot be made as asked, or does not fit the model it is used with."""


class InfeasibleError(PlanError):
    """No plan meets the limits; the message says which limit, where, and the smallest change that fits.

    ``finer_may_help`` is False where no cut of a finer graph can meet them either.
    """

    def __init__(self, message: str, *, finer_may_help: bool = True) -> None:
        super().__init__(message)
        self.finer_may_help = finer_may_help


class UndecidedError(InfeasibleError):
    """No plan was found in the time given, and none was ruled out; the message says what was tried."""


class ScheduleError(AutopipeError):
    """A schedule is malformed: an action is missing, doubled, out of order, or deadlocks."""


class VerificationError(AutopipeError):
    """The pipeline and the model disagree; names the first op that differs and by how much."""


class StaleError(AutopipeError, RuntimeError):
    """Weights or gradients that another rank has were asked for here; says which, and how to get them."""


class StepError(AutopipeError):
    """A rank failed, died or stalled during a step; names rank, stage, microbatch, action and cause."""
