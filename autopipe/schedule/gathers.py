"""When a rank gathers the weights of its stages that replicas hold in shards, and when it lets them go.

Gathering them is left to ``runtime``, what it takes to ``simulator``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .actions import Action

__all__ = ["Gather", "gathers"]


@dataclasses.dataclass(frozen=True, slots=True)
class Gather:
    """A stage's weights are made whole; or, ``is_end``, are shards again.

    >>> str(Gather(2)), str(Gather(2, is_end=True))
    ('2UNSHARD', '2RESHARD')
    """

    stage: int
    is_end: bool = False

    def __str__(self) -> str:
        return f"{self.stage}{'RESHARD' if self.is_end else 'UNSHARD'}"


def gathers(
    row: Sequence[Action], sharded: Sequence[int], most: int | None = None
) -> tuple[tuple[Gather, ...], ...]:
    """What comes before each action of a rank, and after its last, so that each finds its stage whole.

    At most ``most`` of the ``sharded`` stages are whole at a time, all for None: each is gathered once then.
    Else the one needed again last goes, so that as few are gathered as can be (Belady).
    A stage is gathered while the action before the one that needs it runs, where ``most`` leaves room for
    both, and goes after the last that does. O(actions × stages).

    >>> row = [Action(s, "F", 0) for s in (0, 2, 0)]
    >>> [" ".join(map(str, before)) for before in gathers(row, (0, 2))]
    ['0UNSHARD 2UNSHARD', '', '2RESHARD', '0RESHARD']
    """
    stages = [action.stage if action.stage in sharded else None for action in row]
    later = _next_uses(stages)
    whole: dict[int, int] = {}  # when each is needed next
    out: list[tuple[Gather, ...]] = []
    for i, stage in enumerate(stages):
        found: list[Gather] = []
        ended = [s for s, use in whole.items() if use == len(row)]
        found += [Gather(s, is_end=True) for s in ended]
        for s in ended:
            del whole[s]
        following = stages[i + 1] if i + 1 < len(row) else None
        for wanted in (stage, following):
            if wanted is None or wanted in whole:
                continue
            if most is not None and len(whole) >= most:
                others = [s for s in whole if s not in (stage, following)]
                if wanted == following and not others:
                    continue
                goes = max(others or [s for s in whole if s != stage], key=whole.__getitem__)
                del whole[goes]
                found.append(Gather(goes, is_end=True))
            whole[wanted] = i if wanted == stage else i + 1
            found.append(Gather(wanted))
        if stage is not None:
            whole[stage] = later[i]
        out.append(tuple(found))
    out.append(tuple(Gather(s, is_end=True) for s in whole))
    return tuple(out)


def _next_uses(stages: Sequence[int | None]) -> list[int]:
    """For each action, the next one of the same stage; how many there are where there is none."""
    out, seen = [len(stages)] * len(stages), dict[int, int]()
    for i in range(len(stages) - 1, -1, -1):
        stage = stages[i]
        if stage is not None:
            out[i] = seen.get(stage, len(stages))
            seen[stage] = i
    return out
