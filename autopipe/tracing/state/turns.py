"""Whose turn it is to run a model that is being looked at: threads wait for one another.

What a recording puts into torch, Python and the model for a while is the whole process's. Two at once would
see each other's, and the first to end would put back what the second has there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["in_turn"]

_turn = threading.RLock()


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """Within it no other thread is; the same thread may enter again."""
    with _turn:
        yield
