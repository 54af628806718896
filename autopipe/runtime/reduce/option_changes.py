"""Whether options of optimizers, such as their rates, were changed on some ranks alone between two steps.

Each rank has its own optimizer, of its own layers. Which optimizers are a rank's is left to ``refusals``,
bringing ranks what others tell to ``runner``.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, optim

__all__ = ["OptionChanges", "Told", "are_unlike", "unlike"]

Told = tuple[str, dict[str, str], dict[str, str]]
"""A group of an optimizer: the kind of that, the group's options in its first step, and in its last."""
FIRST_BIT, N_BITS = 10, 24
_ALL = (1 << N_BITS) - 1


class OptionChanges:
    """Watches the groups of a rank's optimizers from step to step of these."""

    def __init__(self) -> None:
        self._bits: int | None = 0
        self._first: WeakKeyDictionary[optim.Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()
        self._last: WeakKeyDictionary[optim.Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()
        self._kept_by_steps: set[tuple[type, str]] = set()

    def before_step(self, optimizer: optim.Optimizer) -> None:
        """An optimizer is about to step by the options that it has now."""
        now, last = [*map(_options, optimizer.param_groups)], self._last.get(optimizer)
        if now == last:
            return
        if last is None or len(last) != len(now):
            self._first[optimizer] = now
        self._last[optimizer], self._bits = now, None

    def after_step(self, optimizer: optim.Optimizer) -> None:
        """What its own step has changed is no option that a user sets; torch's own change none."""
        if type(optimizer).__module__.startswith("torch.optim."):
            return
        now, last = [*map(_options, optimizer.param_groups)], self._last.get(optimizer)
        if last is None or now == last:
            return
        for was, group in zip(last, now, strict=False):
            changed = {name for name in (was.keys() | group.keys()) if was.get(name) != group.get(name)}
            self._kept_by_steps.update((type(optimizer), name) for name in changed)
        self._last[optimizer], self._bits = now, None

    @property
    def bits(self) -> int:
        """Of a number of what was changed and into what, all of its ones and then all of its noughts.

        So the union of several ranks' tells whether theirs are equal. 0 before an optimizer's first step.
        """
        if self._bits is None:
            self._bits = self._bits_now()
        return self._bits

    def _bits_now(self) -> int:
        groups = self.told()
        changes = {
            (kind, name, first.get(name), last.get(name))
            for kind, first, last in groups
            for name in first.keys() | last.keys()
            if first.get(name) != last.get(name)
        }
        alone = groups if len(groups) == 1 else []
        number = zlib.crc32(repr([sorted(map(repr, changes)), alone]).encode()) & _ALL
        return (number | (~number & _ALL) << N_BITS) << FIRST_BIT

    def told(self) -> list[Told]:
        """The groups of all optimizers that have stepped."""
        found: list[Told] = []
        for optimizer, last in self._last.items():
            pairs = zip(self._first[optimizer], last, strict=True)
            kind = type(optimizer)
            found += [(kind.__qualname__, self._as_told(kind, a), self._as_told(kind, b)) for a, b in pairs]
        return found

    def _as_told(self, kind: type, group: Mapping[str, Any]) -> dict[str, str]:
        return {n: _shown(v) for n, v in sorted(group.items()) if (kind, n) not in self._kept_by_steps}


def are_unlike(union: int) -> bool:
    """Whether some ranks' ``bits`` are not others', by the union of all."""
    bits = union >> FIRST_BIT
    return bool(bits & (bits >> N_BITS) & _ALL)


def unlike(by_rank: Sequence[Sequence[Told]]) -> tuple[dict[int, str], str] | None:
    """What ranks have otherwise, by rank, and what they had in common; None where that may be meant.

    So it is where groups began alike on several ranks, and where each has one of the same kind. Groups of one
    rank that began alike and parted there have a schedule each.
    """
    ways: dict[str, dict[int, list[Mapping[str, str]]]] = {}
    for rank, groups in enumerate(by_rank):
        for kind, first, last in groups:
            ways.setdefault(repr((kind, first)), {}).setdefault(rank, []).append(last)
    for held in ways.values():
        if all(last == each[0] for each in held.values() for last in each):
            found = _differing({rank: each[0] for rank, each in held.items()})
            if found is not None:
                return found, "as both were alike at first"
    alone = {rank: groups[0] for rank, groups in enumerate(by_rank) if groups}
    is_one = all(len(groups) < 2 for groups in by_rank) and len({kind for kind, _, _ in alone.values()}) == 1
    found = _differing({rank: last for rank, (_, _, last) in alone.items()}) if is_one else None
    return None if found is None else (found, "each rank having one group of parameters")


def _differing(options: Mapping[int, Mapping[str, str]]) -> dict[int, str] | None:
    """An option that two ranks have otherwise, with what each has."""
    (first, has), *others = options.items()
    for rank, other in others:
        names = [name for name in has.keys() | other.keys() if has.get(name) != other.get(name)]
        if names:
            name = "lr" if "lr" in names else min(names)
            return {r: f"{name}={o.get(name, 'none')}" for r, o in ((first, has), (rank, other))}
    return None


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's numbers, flags and words; what lies on an accelerator is not waited for."""
    held = {
        name: value.item() if isinstance(value, Tensor) and value.is_cpu and value.numel() == 1 else value
        for name, value in group.items()
        if name != "params"
    }
    return {name: value for name, value in held.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, (int, float, complex, str, type(None)))


def _shown(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else repr(value)
