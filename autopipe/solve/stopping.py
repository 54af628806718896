"""How a search of many parts ends: Ctrl-C is heard once by all of them, a first answer has some grace.

What is best so far is kept by whoever searches.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["GRACE_S", "interrupts"]

GRACE_S = 0.1
"""A first answer is worth so much more than the time given."""


class _Handler:
    """Python's own answer to Ctrl-C, which also sets an event."""

    def __init__(self, pressed: threading.Event) -> None:
        self.pressed = pressed

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.pressed.set()
        signal.default_int_handler(number, frame)


@contextlib.contextmanager
def interrupts() -> Iterator[threading.Event]:
    """An event that is set once the user pressed Ctrl-C; :class:`KeyboardInterrupt` is raised as always.

    A part of a search may answer the exception with the best it has; the event tells the others, and those
    of a search that this one is part of. Only where Python's own handler is in place, in the main thread;
    else the event is never set.
    """
    there = signal.getsignal(signal.SIGINT)
    if isinstance(there, _Handler):
        yield there.pressed
        return
    pressed = threading.Event()
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or there is not signal.default_int_handler:
        yield pressed
        return
    signal.signal(signal.SIGINT, _Handler(pressed))
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
