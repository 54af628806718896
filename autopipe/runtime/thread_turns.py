"""Whose turn at a runtime it is: threads take turns, or are refused where turns could not be kept alike.

What is done in a turn is left to ``runner`` and ``between_steps``.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from ..errors import InputError

__all__ = ["Turn"]

_drawing = threading.RLock()
"""Held while a runtime seeds the generators, which are the whole process's."""
_turns = weakref.WeakSet["Turn"]()


class Turn:
    """Within it one thread has the runtime to itself; the same thread may enter again.

    ``waits``: another thread waits for its turn. Else it is refused by ``fail`` at once: each rank's threads
    come in an order of their own, and ranks that serve them in different orders wait for one another for
    ever. A forked child of the process is refused then too: the links are its parent's. So is one that was
    forked while another thread had its turn, which never ends there. Runtimes whose models draw random
    numbers (``draws``) also take turns with each other.
    """

    def __init__(self, *, waits: bool, draws: bool, fail: Callable[[BaseException], NoReturn]) -> None:
        # in this order everywhere, so that no two threads wait for each other
        self._locks = (_drawing, threading.RLock()) if draws else (threading.RLock(),)
        self._waits, self._fail, self._process = waits, fail, os.getpid()
        self._is_lost = False
        _turns.add(self)

    def __enter__(self) -> None:
        if not self._waits and os.getpid() != self._process:
            raise InputError(
                f"process {os.getpid()} was forked from {self._process}, whose links to other ranks this "
                "runtime uses; call it in that process alone, and give a forked one (such as a DataLoader's "
                "worker) only what it needs"
            )
        if self._is_lost:
            raise InputError(
                f"process {os.getpid()} was forked while another thread of its parent used a runtime, which "
                "is here as it was amid that; fork between calls, or make the runtime in the forked process"
            )
        for taken, lock in enumerate(self._locks):
            if not lock.acquire(blocking=self._waits):
                self._release(taken)
                self._fail(
                    InputError(
                        f"thread {threading.current_thread().name} uses a runtime that another thread of "
                        "this rank is using now; over several ranks all calls must come from one thread, in "
                        "the same order on every rank: hand this thread's batches to that one through a queue"
                    )
                )

    def __exit__(self, *error: Any) -> None:
        self._release(len(self._locks))

    def _release(self, n: int) -> None:
        for lock in reversed(self._locks[:n]):
            lock.release()

    def be_forked(self) -> None:
        """In a child of the process, which has no other threads: what these had they never give back."""
        self._is_lost = not all(map(_is_free, self._locks))


def _is_free(lock: Any) -> bool:
    """Whether no other thread has a lock."""
    is_free = lock.acquire(blocking=False)
    if is_free:
        lock.release()
    return bool(is_free)


def _be_forked() -> None:
    global _drawing
    for turn in _turns:
        turn.be_forked()
    if not _is_free(_drawing):  # and so lost to all that share it
        _drawing = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_be_forked)
