"""Containers that leaves fill for one another, as a list of skips on the model: told by how much is in them.

A stage that has the one leaf alone would not have what the other has put there. What is done about it is
left to ``session``; what leaves take by other ways, to ``foreign``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

__all__ = ["PassedOn"]


class PassedOn:
    """Notes who changes how much there is in ``holders`` in a run: leaves by path, open code as ""."""

    def __init__(self, holders: Sequence[Collection[object]] = ()) -> None:
        self._holders = holders
        self._first = self._now = [*map(len, holders)]
        self._changed: defaultdict[int, dict[str, None]] = defaultdict(dict)

    def note(self, path: str) -> bool:
        """Whether anything has changed since the last question, by who is at ``path``."""
        before, self._now = self._now, [*map(len, self._holders)]
        if before == self._now:
            return False
        for place, (then, now) in enumerate(zip(before, self._now, strict=True)):
            if then != now:
                self._changed[place][path] = None
        return True

    def leaf(self) -> str | None:
        """A leaf that has changed a container, as others have, which is as full as at first by now."""
        self.note("")
        for place, paths in self._changed.items():
            if len(paths) > 1 and self._now[place] == self._first[place]:
                return next(filter(None, paths))
        return None
