"""Work that torch may never come back from, in a thread of its own, so that who waits for it need not.

When there is no use in waiting on is left to the caller.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["aside"]

T = TypeVar("T")
POLL_S = 0.05


def aside(work: Callable[[], T], name: str, check: Callable[[], None]) -> T:
    """What ``work`` makes, or raises. Meanwhile ``check`` is called again and again, and may raise instead.

    torch's clients of a store wait without end for a host that is stopped. A thread left behind so ends with
    the process.
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
