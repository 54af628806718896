"""What a forward writes into the dicts, lists and objects that it is given: seen, and repeated for a caller.

Its writes to tensors themselves are left to ``recorder``, dicts that leaves fill to ``dict_arguments``.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from ...errors import CaptureError, InputError
from .arguments import arguments, shown
from .free_numbers import plainly_given
from .held_numbers import HELD, divided, leave, names_set, numbers_of, placed
from .mutable import Holder, content, holders
from .structure import Spec, Step, with_marks

__all__ = [
    "Written",
    "called",
    "check_written",
    "given_twice",
    "names_written",
    "numbers_left",
    "said_of",
    "write_back",
]

Twice = Mapping[tuple[Step, ...], tuple[Step, ...]]
"""The steps to something among arguments → those to another place where the very same is."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where among the arguments a forward writes: the steps to a container or an object, a name first.

    ``kind`` is that of a step further; ``gone`` are the keys that a forward takes away there.
    """

    trail: tuple[Step, ...]
    kind: str
    gone: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Written:
    """What a model returns, and what it writes into its arguments: the values that are new by key."""

    result: Any
    changes: Mapping[Place, Mapping[Any, Any]]


_NUMBERS = Place((("item", HELD),), "item", ())
"""Where the numbers are that a forward leaves in attributes."""


def called(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], sets: Iterable[str] | None = None
) -> Any:
    """What ``model`` returns, as :class:`Written` where it writes into its arguments.

    Or where it ``sets`` numbers in attributes, by path and name: those that the arguments say, as a rule.

    What copies of arguments have in common, such as an object that holds no tensors, is put back in any case;
    raises :class:`CaptureError` where the model writes into that.
    """
    sets = names_set(kwargs) if sets is None else sets
    args, kwargs = plainly_given((args, kwargs))
    kwargs, numbers = divided(kwargs)
    held = [*holders(arguments(model, args, kwargs))]
    try:
        with placed(model, numbers):
            result = with_marks(model(*args, **kwargs))
            left = numbers_of(model, sets)
        changes: dict[Place, dict[Any, Any]] = _changes(model, held)
    finally:
        for holder in held:
            if holder.is_bare:
                holder.put_back()
    changes |= {_NUMBERS: left} if left else {}
    return Written(result, changes) if changes else result


def numbers_left(output: Spec, leaves: Sequence[Any]) -> dict[str, Any]:
    """Of the leaves of a forward's output the numbers that it leaves in attributes, by path and name."""
    if output.type is not Written:
        return {}
    result, changes = output.children
    start = result.n_leaves
    for place, new in zip(changes.keys, changes.children, strict=True):
        if place == _NUMBERS:
            return dict(zip(new.keys, leaves[start:], strict=False))
        start += new.n_leaves
    return {}


def _changes(model: nn.Module, held: Sequence[Holder]) -> dict[Place, dict[Any, Any]]:
    found = {}
    for holder in held:
        new, gone = holder.changes()
        if not (new or gone):
            continue
        if holder.is_bare:
            raise CaptureError(
                f"{type(model).__name__}'s forward writes into its argument {shown(holder.trail)}, a "
                f"{type(holder.owner).__name__} in which no tensor is given; return what it writes, or give "
                "it a dict or a list"
            )
        found[Place(holder.trail, holder.kind, gone)] = new
    return found


def write_back(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], written: Written) -> None:
    """Write into the arguments of a call what the model would, and into its attributes.

    Raises :class:`InputError` where it writes into what is given twice.
    """
    given = arguments(model, args, kwargs)
    _check_apart(model, given_twice(given), [place.trail for place in written.changes])
    found = [(_at(given, place.trail), place, new) for place, new in written.changes.items()]
    for owner, place, new in found:
        if place == _NUMBERS:
            leave(model, new)
        elif place.kind == "attr":
            for name in place.gone:
                object.__delattr__(owner, name)
            for name, value in new.items():
                object.__setattr__(owner, name, value)
        elif isinstance(owner, list):
            del owner[len(owner) - len(place.gone) :]
            for key, value in new.items():
                owner[key : key + 1] = [value]
        else:
            for key in place.gone:
                del owner[key]
            owner.update(new)


def given_twice(given: Mapping[str, Any]) -> Twice:
    """The steps to each container and object that is among some arguments in two places, and to the other.

    Not to those that copies have in common wherever they are, which stay one.
    """
    places: defaultdict[int, dict[tuple[Step, ...], bool]] = defaultdict(dict)
    for holder in holders(given):
        places[id(holder.owner)][holder.trail] = holder.is_bare
    several = [[*trails] for trails in places.values() if len(trails) > 1 and not all(trails.values())]
    return {trail: next(t for t in trails if t != trail) for trails in several for trail in trails}


def check_written(model: nn.Module, twice: Twice, outputs: Iterable[Spec]) -> None:
    """Raise :class:`InputError` where a forward with these outputs writes into what is given ``twice``.

    Of that a pipeline makes two.
    """
    written = [s.children[1] for s in outputs if s.type is Written]
    _check_apart(model, twice, [place.trail for changes in written for place in changes.keys])


def _check_apart(model: nn.Module, twice: Twice, trails: Sequence[tuple[Step, ...]]) -> None:
    if found := {trail: twice[trail] for trail in trails if trail in twice}:
        raise InputError(
            f"{type(model).__name__}'s forward writes into its arguments, of which {said_of(found)}"
        )


def said_of(twice: Twice) -> str:
    """That something is given ``twice``, in words."""
    one, other = map(shown, next(iter(twice.items())))
    return (
        f"{one} and {other} are one object, of which a pipeline makes two; give it a copy of its own for each"
    )


def names_written(output: Spec) -> list[str]:
    """What a forward with this output writes or takes away, as a person would write it: ``batch['h']``."""
    if output.type is not Written:
        return []
    changes = output.children[1]
    return [
        shown((*place.trail, (place.kind, key)))
        for place, new in zip(changes.keys, changes.children, strict=True)
        if place != _NUMBERS
        for key in (*new.keys, *place.gone)
    ]


def _at(given: Mapping[str, Any], trail: tuple[Step, ...]) -> Any:
    found: Any = given
    for kind, key in trail:
        found = content(found, kind)[key]
    return found
