"""Dicts that a leaf is given and puts tensors into, or takes them out of: copied for its call, read after it.

So no dict lives longer than one run, and what is in it crosses a cut as any tensor does. Encoding arguments
is left to ``ledger``.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import MutableMapping, Sequence
from typing import Any

from ..calls import functions, named
from ..calls.call import Call, meta
from ..inputs.structure import along, flatten, paths, unflatten
from ..values.ledger import Ledger
from ..values.tracked import plain

__all__ = ["Dict", "dicts", "handed_back", "refilled"]


@dataclasses.dataclass(frozen=True, slots=True)
class Dict:
    """A dict among a leaf's arguments: the code's own, the one that is ``passed``, and what that held."""

    place: int | str
    own: MutableMapping[Any, Any]
    passed: MutableMapping[Any, Any]
    before: dict[Any, Any]

    @property
    def changed(self) -> list[Any]:
        """The keys whose values are others now."""
        return [k for k, v in self.passed.items() if k not in self.before or self.before[k] is not v]

    @property
    def gone(self) -> list[Any]:
        return [k for k in self.before if k not in self.passed]


def dicts(args: Any, kwargs: Any, actual: Any, first: int = 0) -> list[Dict]:
    """The dicts that a leaf is given, and may change; its arguments are the call's from the ``first`` on."""
    pairs: list[tuple[int | str, Any, Any]] = [
        *((i, own, got) for i, (own, got) in enumerate(zip(args, actual[0], strict=True), first)),
        *((k, own, actual[1][k]) for k, own in kwargs.items()),
    ]
    return [
        Dict(place, own, got, dict(got)) for place, own, got in pairs if isinstance(own, (dict, UserDict))
    ]


def refilled(ledger: Ledger, call: Call, found: Sequence[Dict]) -> None:
    """Let the recording's last call, of a leaf, have dicts of its own where it changed those it was given."""
    for given in found:
        if not given.changed and not given.gone:
            continue
        leaves, spec = flatten(given.before)
        spec = dataclasses.replace(spec, type=type(given.own))
        holder = Call("call_function", named.Rebuild(spec), tuple(ledger.encode(v)[0] for v in leaves))
        holder.hint, holder.path, holder.depends = "filled", call.path, ledger.depends(holder)
        holder.value = unflatten(spec, [meta(plain(v)) for v in leaves])
        ledger.calls.remove(call)
        ledger.add(holder)
        ledger.add(call)
        args = tuple(holder if i == given.place else a for i, a in enumerate(call.args))
        call.take(args, {k: holder if k == given.place else a for k, a in call.kwargs.items()})
        behind = Call("call_function", named.Named(behind_of, "filled"), (holder, call), accessor=True)
        behind.hint, behind.path, behind.depends = "filled", call.path, call.depends
        _read_again(ledger, ledger.add(behind), given)


def handed_back(gave: Any, result: Any, found: Sequence[Dict]) -> Any:
    """The ``result`` of a leaf, with the code's own dicts where it ``gave`` those that it was given."""
    for given in found:
        if gave is given.passed:
            return given.own
    if type(gave) not in (tuple, list):
        return result
    made = [handed_back(*each, found) for each in zip(gave, result, strict=True)]
    return result if all(a is b for a, b in zip(made, result, strict=True)) else type(gave)(made)


def behind_of(filled: Any, result: Any) -> Any:
    """The dict, once the call is over that gave ``result``."""
    return filled


def _read_again(ledger: Ledger, behind: Call, given: Dict) -> None:
    """Tie what is in the dict now to ``behind``, and put it into the code's own."""
    leaves, spec = flatten(given.passed)
    behind.value = unflatten(spec, [meta(plain(v)) for v in leaves])
    behind.storages = frozenset().union(*map(functions.storages, leaves))
    changed = given.changed
    new = [
        ledger.adopt_piece(behind, path, row, set()) if path[0][1] in changed else row[-1]
        for path, row in zip(paths(spec), along(spec, leaves), strict=True)
    ]
    now = unflatten(spec, new)
    for key in given.gone:
        given.own.pop(key, None)
    given.own.update({k: now[k] for k in changed})
    ledger.bare = [(value, path) for value, path in ledger.bare if value is not given.own]
