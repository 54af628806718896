"""What a process leaves for the job's other ranks when it ends, so that who waits for it need not wait on.

Before there is a pipeline nothing else tells who is gone from who is late; in one ``failure`` does.
"""

from __future__ import annotations

import contextlib
import sys

import torch.distributed as dist

from ...errors import StepError
from ...torch_private import default_store
from .board import Board
from .job_key import Seal, attempt, job_key

__all__ = ["ended", "say_ended"]

_CORNER = "ended"


def say_ended() -> None:
    """Leave word that the process ends, where it is in a group of ranks: they may wait for it."""
    if not dist.is_initialized():
        return
    error = getattr(sys, "last_value", None)  # what the interpreter ends with
    rank, name = dist.get_rank(), f"autopipe/{attempt()}/{_CORNER}"
    text = f"rank {rank} left: its script came to an end; make the same calls on every rank"
    if error is not None:
        text = f"rank {rank} ended with {type(error).__name__}: {error}; look at its log"
    if isinstance(error, StepError):
        text = str(error)  # of a rank that failed before this one did
    store = dist.PrefixStore(name, default_store())  # type: ignore[attr-defined]
    with contextlib.suppress(RuntimeError):  # the store is gone, and who waits for its host knows
        store.set(str(rank), Seal(job_key(), name).close(str(rank), text))


def ended(board: Board, rank: int) -> str:
    """In words, how rank ``rank`` of the job has ended; else empty. ``board`` is any corner."""
    return board.corner(_CORNER).look(str(rank)) or ""
