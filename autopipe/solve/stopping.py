"""Ctrl-C during a search of many parts: heard once, it stops all of them.

What is best so far is kept by whoever searches.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["interrupts"]


@contextlib.contextmanager
def interrupts() -> Iterator[threading.Event]:
    """An event that is set once the user pressed Ctrl-C; :class:`KeyboardInterrupt` is raised as always.

    A part of a search may answer the exception with the best it has; the event tells the others. Only where
    Python's own handler is in place, in the main thread; else the event is never set.
    """
    pressed = threading.Event()

    def handler(number: int, frame: FrameType | None) -> None:
        pressed.set()
        signal.default_int_handler(number, frame)

    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield pressed
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
