"""Which memory the calls of a recording write into, and which calls have to stay together for it.

Keeping them in one stage is left to ``opgraph`` for what is planned, and to ``stages`` for what is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from .call import Call

__all__ = ["Written", "written"]


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """Memory that calls write into.

    Attributes
    ----------
    users: all calls that touch it, in order; ``writes`` those that write into it.
    together: those up to the last write, or all where the memory ``is_held`` by the model or its caller.
    """

    users: Sequence[Call]
    writes: Sequence[Call]
    together: Sequence[Call]
    is_held: bool


def written(calls: Sequence[Call]) -> Iterator[Written]:
    """Each memory that some of these calls, all of a recording, write into."""
    held = frozenset().union(*(c.storages for c in calls if c.op in ("placeholder", "get_attr")))
    for storage in frozenset().union(*(c.writes for c in calls if c.op != "output")):
        users = [c for c in calls if storage in c.storages | c.reads or storage in c.writes]
        last = max(i for i, c in enumerate(users) if storage in c.writes)
        is_held = storage in held
        together = users if is_held else users[: last + 1]
        inside = [c for c in together if c.op not in ("placeholder", "get_attr", "output")]
        yield Written(users, [c for c in users if storage in c.writes], inside, is_held)
