"""Calls into torch that may never return, made in a thread of their own, so that the caller can give up.

When to give up is left to the caller.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["in_side_thread"]

T = TypeVar("T")
POLL_S = 0.05


def in_side_thread(work: Callable[[], T], name: str, check: Callable[[], None]) -> T:
    """What ``work`` makes, or raises. Meanwhile ``check`` is called again and again, and may raise instead.

    torch's clients of a store wait without end for a host that is stopped. A thread that is left behind ends
    with the process.
    """
    made: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            made.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_S)
        if thread.is_alive():
            check()
    if errors:
        raise errors[0]
    return made[0]
