"""How a search of many parts ends: by one clock, Ctrl-C heard once by all, some grace for a first answer.

What is best so far is kept by whoever searches.
"""

from __future__ import annotations

import contextlib
import contextvars
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["GRACE_S", "clock_s", "interrupts", "timed_by_work"]

GRACE_S = 0.1
"""A first answer is worth so much more than the time given."""

_clock: contextvars.ContextVar[Callable[[], float]] = contextvars.ContextVar(
    "clock", default=time.perf_counter
)


def clock_s() -> float:
    """Seconds by the clock that deadlines are told in."""
    return _clock.get()()


@contextlib.contextmanager
def timed_by_work(is_so: bool = True) -> Iterator[None]:
    """Within it the clock is the processor's: what a search does in its time is the same on a busy machine.

    For times that nobody asked for: those that a user gives are on the clock on the wall, as all are unless
    ``is_so``.
    """
    token = _clock.set(time.thread_time if is_so else _clock.get())
    try:
        yield
    finally:
        _clock.reset(token)


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
