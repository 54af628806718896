"""What a process leaves for the job's other ranks when it ends, so that who waits for it need not wait on.

Before there is a pipeline nothing else tells who is gone from who is late; in one ``failure`` does.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch.distributed as dist

from ...errors import StepError
from ...torch_private import default_store, store_of_first_group
from .board import Board
from .job_key import Seal, attempt, job_key

__all__ = ["ended", "say_ended", "say_not_joined"]

_CORNER = "ended"
ANSWER_S = 5.0
"""How long the store may take to hear it: nobody is to wait for a host that is stopped."""


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


def say_not_joined(store: Any, rank: int, error: Exception) -> None:
    """Leave word in the group's ``store`` that ``error`` kept ``rank`` out; others may be in it."""
    board = Board(store_of_first_group(store), _CORNER, lambda: ANSWER_S)
    first_line = str(error).partition("\n")[0]  # torch's have the stack below it
    why = f"{type(error).__name__}: {first_line}"
    text = f"rank {rank} could not join the process group: {why}; look at its log"
    with contextlib.suppress(RuntimeError):  # the store is gone, and who waits for its host knows
        board.post(str(rank), text)
    board.close()


def ended(board: Board, rank: int) -> str:
    """In words, how rank ``rank`` of the job has ended; else empty. ``board`` is any corner."""
    return board.corner(_CORNER).look(str(rank)) or ""
