"""Whose turn it is to run a model that is being looked at: threads wait for one another.

What a recording puts into torch, Python and the model for a while is the whole process's. Two at once would
see each other's, and the first to end would put back what the second has there.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType

from ...errors import CaptureError

__all__ = ["in_turn"]

_STUCK_S = 10.0
"""So long may the thread whose turn it is wait for another one at one place while others wait for it."""
_LOOKS = 10
"""How often it is looked at meanwhile."""
_WAITING = threading.__file__
"""Whose code threads wait in: for others to end, for events, for what executors compute."""


class _Turn:
    """A lock that the same thread may enter again, and that never waits for ever.

    Raises :class:`CaptureError` where who has it waits itself, and in a process that was forked meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner, self._is_lost = 0, False

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._wait()
        self._owner = threading.get_ident()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def be_forked(self) -> None:
        """In a child of the process, which has no other threads: whose turn another one has never ends."""
        if not self._lock.acquire(blocking=False):
            self._is_lost = True
        else:
            self._lock.release()

    def _wait(self) -> None:
        if self._is_lost:
            raise CaptureError(
                f"process {os.getpid()} was forked while another thread of its parent captured a model, so "
                "that torch and the model are here as they are amid that; fork ahead of the capture or once "
                "it is over, or start processes by 'spawn'"
            )
        n_same, place = 0, None
        while not self._lock.acquire(timeout=_STUCK_S / _LOOKS):
            frame = sys._current_frames().get(self._owner)
            now = None if frame is None else (id(frame), frame.f_lasti)
            n_same, place = n_same + 1 if now == place else 0, now
            if n_same >= _LOOKS and frame is not None and frame.f_code.co_filename == _WAITING:
                raise CaptureError(
                    f"thread {threading.current_thread().name} is to capture, while thread "
                    f"{_name(self._owner)} captures and has waited at {_place(frame)} for {_STUCK_S:g} s: a "
                    "forward that waits for a thread which captures would wait for ever, as one capture at a "
                    "time has torch; capture what the other thread does ahead of it, or in the forward's own"
                )


def _name(ident: int) -> str:
    return next((t.name for t in threading.enumerate() if t.ident == ident), str(ident))


def _place(frame: FrameType) -> str:
    """``file:line`` of the code that waits, whichever of the standard library it waits by."""
    library = str(pathlib.Path(_WAITING).parent)
    above: FrameType | None = frame

    def is_library(code: CodeType) -> bool:
        return code.co_filename.startswith(library) and "site-packages" not in code.co_filename

    while above is not None and is_library(above.f_code):
        above = above.f_back
    found = above or frame
    return f"{found.f_code.co_filename}:{found.f_lineno}"


_turn = _Turn()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_turn.be_forked)


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """Within it no other thread is; the same thread may enter again.

    Raises :class:`CaptureError` where that would never come to be.
    """
    with _turn:
        yield
