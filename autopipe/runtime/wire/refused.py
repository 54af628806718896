"""What keeps one rank alone from a call that all make, told at once to those that wait for it there.

Calls between steps are agreed on (``peers``); this is for those without a pipeline: ``split``, ``runtime``.
"""

from __future__ import annotations

import contextlib

import msgspec

from ...errors import AutopipeError, InputError, StepError
from ...torch_private import default_store
from .board import Board

__all__ = ["refusal", "say_refused"]

ANSWER_S = 5.0
"""How long the store may take to hear of it: whoever is refused is not to wait for a host that is stopped."""


class _Told(msgspec.Struct, frozen=True):
    """Why, in words, and whether that is the call's own refusal and not what stopped its rank."""

    text: str
    is_refused: bool


def say_refused(corner: str, call: str, rank: int, error: BaseException) -> None:
    """Leave word in a ``corner`` of the job's store of the ``error`` by which ``rank`` leaves a ``call``."""
    name = type(error).__name__
    if not isinstance(error, Exception):
        told = _Told(f"rank {rank} was stopped by {name} in {call}", False)
    elif isinstance(error, StepError):
        told = _Told(str(error), False)  # of a rank that failed before this one did
    else:
        text = str(error) if isinstance(error, AutopipeError) else f"{name}: {error}"
        told = _Told(f"{call} on rank {rank}: {text}", True)
    board = Board(default_store(), corner, lambda: ANSWER_S)
    with contextlib.suppress(RuntimeError):  # the store is gone, and who waits for its host knows
        board.post(f"refused/{rank}", msgspec.json.encode(told).decode())
    board.close()


def refusal(board: Board, rank: int) -> AutopipeError | None:
    """What ranks that wait in the corner of ``board`` are to raise where ``rank`` has left their call."""
    found = board.look(f"refused/{rank}")
    if found is None:
        return None
    told = msgspec.json.decode(found, type=_Told)
    return InputError(told.text) if told.is_refused else StepError(told.text)
