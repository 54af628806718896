"""Questions about sizes that may come out differently and do no harm: whether to pad to a multiple, mostly.

Padding by nothing is not padding, so what was recorded with it is right without. Told by running at sizes
where a question comes out differently, two if there are: at one alone the code may have met another question
that is answered otherwise at the next. Those runs are left to ``trials``.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence

from ...graph import Dim
from ..calls.call import Guard
from .guards import is_stepped
from .trials import Explorer
from .variation import Check, Variation

__all__ = ["find_harmless", "uneven_sizes"]

_MOST_RUNS = 12
_NEAR = 16
_TIMES = 3


def find_harmless(explorer: Explorer, dims: Sequence[Dim], found: Variation) -> set[int]:
    """Ids of guards whose other outcome leaves the result as the model's, wherever it was met."""
    met = {guard: {*at} for guard, at in explorer.spared.items()}
    harmful: set[int] = set()
    for sizes in itertools.islice(_probes(dims, found), _MOST_RUNS):
        failed, is_right = explorer.judge(sizes)
        if not is_right:
            harmful |= failed
        for guard in failed:
            met.setdefault(guard, set()).add(frozenset(sizes.items()))
    needed = {id(g): _needed(g, dims, found) for form in explorer.forms for g in form.guards}
    return {guard for guard, at in met.items() if len(at) >= needed[guard]} - harmful


def uneven_sizes(found: Variation) -> list[tuple[Dim, int]]:
    """Two sizes of a dim near its own at which a check fails that asks for a remainder; none without such.

    Halves and doubles of them, at which a capture is tried, leave other remainders.
    """
    base = {d.name: d.example for d in found.dims}
    for dim in (d for d in found.dims if not d.packed and d.name != "batch"):
        for check in found.checks:
            failing = _failing(check, dim, base) if any(map(is_stepped, check.operands)) else []
            if failing:
                return [(dim, size) for size in (*failing[4:7:2], *failing)[:2]]
    return []


def _probes(dims: Sequence[Dim], found: Variation) -> Iterator[Mapping[Dim, int]]:
    """Sizes of one dim at which a check fails, alone if it does: the nearest, the farthest and one between.

    Where formulas are unsure, some sizes near the example's.
    """
    tried: set[tuple[Dim, int]] = set()
    for dim in (d for d in dims if not d.packed):
        base = {d.name: d.example for d in dims}
        chosen: list[int] = []
        for check in found.checks:
            failing = _failing(check, dim, base)
            others = [c for c in found.checks if c is not check]
            alone = [s for s in failing if all(c.holds({**base, dim.name: s}) for c in others)]
            failing = alone if len(alone) > 1 else failing
            if len(failing) > 1 or (failing and _is_of_one_size(check)):
                chosen += [failing[0], failing[-1], failing[len(failing) // 2]]
        if found.unsure and dim.name != "batch":
            chosen += [dim.example + step for step in (1, 2, 3, 4)] + [2 * dim.example]
        for size in dict.fromkeys(chosen):
            if (dim, size) not in tried:
                tried.add((dim, size))
                yield {dim: size}


def _failing(check: Check, dim: Dim, base: Mapping[str, int]) -> list[int]:
    """The sizes of a dim, the nearest first, at which a check comes out differently."""
    n = dim.example
    if dim.name not in check.symbols:
        return []
    near = (n + step * sign for step in range(1, _NEAR + 1) for sign in (1, -1))
    far = (n * times + rest for times in range(2, _TIMES + 1) for rest in (0, 1))
    asked = (o for o in check.operands if _is_of_one_size(check) and type(o) is int)
    tried = sorted(dict.fromkeys((*near, *far, *asked, *range(2, _NEAR))), key=lambda s: abs(s - n))
    return [s for s in tried if s > 1 and not check.holds({**base, dim.name: s})]


def _is_of_one_size(asked: Check | Guard) -> bool:
    """Whether it was asked if a size is a number that it is not: a key of a dict, say."""
    return asked.function is operator.eq and not asked.outcome


def _needed(guard: Guard, dims: Sequence[Dim], found: Variation) -> int:
    """At how many sizes a guard must have done no harm: at one where it fails at no other above 1."""
    asked = guard.function, guard.outcome, guard.source
    checks = [c for c in found.checks if (c.function, c.outcome, c.source) == asked]
    base = {d.name: d.example for d in dims}
    fails_at_more = not checks or any(_failing(c, d, base) for c in checks for d in dims)
    return 2 if fails_at_more and not _is_of_one_size(guard) else 1
