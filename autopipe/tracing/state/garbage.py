"""Python's search for objects that hold one another alone: less often while a model is recorded.

A recording makes many objects and lets go of few before its end: most of these searches are for nothing.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

__all__ = ["seldom_searched"]

_N_NEW = 50_000
"""After how many new objects Python searches among them meanwhile; as a rule it is 700 or 2,000."""

_Thresholds = tuple[int, int, int]
_lock = threading.Lock()
_under_way: list[tuple[_Thresholds, _Thresholds]] = []
"""Of each recording under way, in whatever thread: the thresholds before the first of them, and meanwhile."""


@contextlib.contextmanager
def seldom_searched() -> Iterator[None]:
    """Within it Python searches after more new objects; where it does not search at all it still does not.

    Thresholds are the process's: the last to leave puts them back, unless others were set meanwhile.
    """
    with _lock:
        if not _under_way:
            n_new, *older = found = gc.get_threshold()
            gc.set_threshold(n_new and max(n_new, _N_NEW), *older)
            _under_way.append((found, gc.get_threshold()))
        else:
            _under_way.append(_under_way[0])
    try:
        yield
    finally:
        with _lock:
            before, meanwhile = _under_way.pop()
            if not _under_way and gc.get_threshold() == meanwhile:
                gc.set_threshold(*before)
