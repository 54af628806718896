"""Which code runs: of functions that do not, what they would do of so many rows need not be asked.

What functions there are, and the numbers in them, is left to ``code.own_code``.
"""

from __future__ import annotations

import cProfile
import sys
import types

__all__ = ["CodeRun"]


class CodeRun:
    """The code of all Python functions that were called within such contexts; all, before one ran to its end.

    They may be entered within one another. Not looked at where a profiler does: Python has one at a time, and
    may not be given it back. Python's own looks: one that were called with each call would take far longer.
    """

    def __init__(self) -> None:
        self._codes: set[types.CodeType] = set()
        self._is_looking = self._is_seen = False
        self._n_within = 0
        self._profile = cProfile.Profile(subcalls=False, builtins=False)

    def __enter__(self) -> CodeRun:
        if not self._n_within:
            self._is_looking = self._begins()
        self._n_within += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._n_within -= 1
        if self._is_looking and not self._n_within:
            self._profile.disable()
            codes = (entry.code for entry in self._profile.getstats())
            self._codes.update(code for code in codes if isinstance(code, types.CodeType))
            self._profile.clear()
            self._is_seen |= kind is None

    def pause(self) -> None:
        """Look away, as while something else runs that looks at a call; until it is to :meth:`go_on`."""
        if self._is_looking and self._n_within:
            self._profile.disable()

    def go_on(self) -> None:
        """Look again where it looked before."""
        if self._is_looking and self._n_within:
            self._profile.enable()

    def may_run(self, function: types.FunctionType) -> bool:
        """Whether a function was called, or nothing was looked at."""
        return not self._is_seen or function.__code__ in self._codes

    def _begins(self) -> bool:
        if sys.getprofile() is not None:
            return False
        try:
            self._profile.enable()
        except ValueError:  # as Python 3.12 and later say of a profiler that they do not name
            return False
        return True
