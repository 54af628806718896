"""Whether an error says that another process is gone, and what ended another replica of the pipeline.

Whose loss it is among a pipeline's own ranks is left to ``peers`` and ``failure``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import torch.distributed as dist

from ...errors import StepError
from .board import Board, StoreGone

__all__ = ["corner", "end_of_a_replica", "loss_in", "tells_of_a_loss"]

NO_MEMORY = ("out of memory", "can't allocate memory")
"""What torch, its backends and drivers say in errors of many types."""
TOLD_S = 2.0
"""How long to wait to be told what ended another replica."""
POLL_S = 0.05


def tells_of_a_loss(error: BaseException) -> bool:
    """Whether a wait ended since its other end is gone: not where memory ran out or a kernel failed, say."""
    if any(words in str(error).lower() for words in NO_MEMORY):
        return False
    is_gloos = type(error) is RuntimeError and "gloo" in str(error)  # with the place in its own source
    return is_gloos or isinstance(error, (ConnectionError, dist.DistError))


def loss_in(error: BaseException) -> BaseException | None:
    """The loss of another process that an action of a stage failed with, as where replicas reduce in it.

    A broken connection there is one of the user's own code: torch's groups have errors of their own.
    """
    found = error.__cause__ if isinstance(error, StepError) else None
    is_theirs = found is None or isinstance(found, ConnectionError) or not tells_of_a_loss(found)
    return None if is_theirs else found


def corner(ranks: Sequence[int], n_made: int) -> str:
    """The part of the job's store of the pipeline on these ranks, of which there were ``n_made`` before."""
    return f"autopipe/{'-'.join(map(str, ranks))}/{n_made}"


def end_of_a_replica(board: Board, replicas: Sequence[Sequence[int]], n_made: int) -> str:
    """In words, what ended one of the ``replicas``, the job's ranks of each; waits for it a moment.

    ``board`` is this pipeline's own: theirs are asked by way of the same connection, however many there are.
    """
    boards = {tuple(ranks): board.corner(corner(ranks, n_made)) for ranks in replicas}
    until_s = time.monotonic() + TOLD_S
    while time.monotonic() < until_s:
        for ranks, theirs in boards.items():
            with contextlib.suppress(StoreGone):
                if cause := theirs.look("error"):
                    return f"another replica, ranks {list(ranks)} of the job, failed: {cause}"
        time.sleep(POLL_S)
    places = ", ".join(str([*ranks]) for ranks in replicas)
    return f"another replica (ranks of the job: {places}) is gone without a word; look at its log"
