"""A save that may still be under way, in a thread beside the one that trains.

What is written there is left to ``save_load`` and ``saving``.
"""

from __future__ import annotations

import logging
import pathlib
import threading
from collections.abc import Callable

__all__ = ["Saving"]

_logger = logging.getLogger(__name__)


class Saving:
    """A save that may still be under way. ``path`` is where it will be."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_heard = False

    def start(self, work: Callable[[], None]) -> None:
        """Do ``work`` in a thread of its own, which the interpreter waits for before it ends."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error
                _logger.warning("the save in the background failed: %s", error)  # if nobody waits for it

        self._thread = threading.Thread(target=run, name="autopipe save")
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it is written, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    @property
    def is_unheard(self) -> bool:
        """Whether it has failed, and nobody has been told by :meth:`wait`."""
        return self._error is not None and not self._is_heard

    def settle(self) -> None:
        """Come back once it is whole, or has failed."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> pathlib.Path:
        """Where it is, once it is whole. Raises what went wrong."""
        self.settle()
        self._is_heard = True
        if self._error is not None:
            raise self._error
        return self.path
