"""Python's search for objects that hold one another alone: less often while a model is recorded.

A recording makes many objects and lets go of few before its end: most of these searches are for nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["seldom_searched"]

_N_NEW = 20_000
"""After how many new objects Python searches among them meanwhile; as a rule it is 700 or 2,000."""


@contextlib.contextmanager
def seldom_searched() -> Iterator[None]:
    """Within it Python searches after more new objects; where it does not search at all it still does not."""
    n_new, *older = gc.get_threshold()
    gc.set_threshold(n_new and max(n_new, _N_NEW), *older)
    try:
        yield
    finally:
        gc.set_threshold(n_new, *older)
