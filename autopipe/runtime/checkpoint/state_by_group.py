"""Lists that an object keeps with one item for each group of an optimizer, as a scheduler its first rates.

Ranks have the groups that their parameters are in, so that under another cut, or on another number of ranks,
each item goes where its group's parameters go. What is kept for each weight is left to ``state_by_weight``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["by_group"]

Groups = Sequence[Sequence[str]]
"""The names of the parameters in each group of an optimizer."""
_OF_TIMES = ("milestones", "_milestones", "_schedule_phases")
"""Lists of torch's schedulers that go by steps, however many groups there are."""
_OF_PARTS = ("_schedulers",)
"""Lists of states of what an object is made of."""


def by_group(
    trees: Sequence[Any],
    savers: Sequence[Groups],
    here: Groups,
    now: Any,
    names: Callable[[str], Sequence[str]],
) -> Any:
    """The first of the states that ranks saved of an object, with the items of the groups that are ``here``.

    ``savers`` are the groups of each of those ranks, ``now`` is the state that the object has, and ``names``
    gives all names of a parameter. A group of parameters that no rank had keeps what it has now. So
    does one without any here, unless groups have the same numbers on the first of those ranks: then it is
    that one's.
    """
    at = {
        name: (r, j) for r, groups in [*enumerate(savers)][::-1] for j, g in enumerate(groups) for name in g
    }
    places = [
        next((at[alias] for name in group for alias in (name, *names(name)) if alias in at), None)
        for group in here
    ]
    if len(here) == len(savers[0]) and all(place is None or place[1] == j for j, place in enumerate(places)):
        places = [
            place if group else (0, j) for j, (place, group) in enumerate(zip(places, here, strict=True))
        ]
    if all(place == (0, j) for j, place in enumerate(places)) and len(places) == len(savers[0]):
        return trees[0]
    return _joined(trees, savers, places, now)


def _joined(
    trees: Sequence[Any], savers: Sequence[Groups], places: Sequence[tuple[int, int] | None], now: Any
) -> Any:
    first = trees[0]
    if isinstance(first, dict) and all(isinstance(tree, dict) for tree in (*trees, now)):
        made = copy.copy(first)
        for key in (first.keys() & now.keys()).difference(_OF_TIMES):
            parts, own = [tree.get(key) for tree in trees], now[key]
            if key in _OF_PARTS and all(len(part) == len(own) for part in parts):
                made[key] = [_joined(each, savers, places, x) for *each, x in zip(*parts, own, strict=True)]
            else:
                made[key] = _joined(parts, savers, places, own)
        return made
    is_of_groups = (
        all(isinstance(tree, (list, tuple)) for tree in (*trees, now))
        and len(now) == len(places)
        and all(len(tree) == len(groups) for tree, groups in zip(trees, savers, strict=True))
    )
    if not is_of_groups:
        return first
    if all(_are_equal(tree, now) for tree in trees):  # the same of whichever groups, as a pair of betas
        return first
    return type(first)(now[i] if at is None else trees[at[0]][at[1]] for i, at in enumerate(places))


def _are_equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (RuntimeError, ValueError):  # of tensors and arrays
        return False
