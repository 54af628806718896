"""Values are told apart by what they hold, wherever they hold it, and forms of them stay as they are."""

from __future__ import annotations

import array
import copy
import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest

from autopipe.tracing.inputs.contents import are_told_alike, contents, parts, plainly


@dataclasses.dataclass(slots=True)
class Slotted:
    number: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    number: Any


class Base:
    __slots__ = ("number", "other")

    def __init__(self, number: Any) -> None:
        self.number = number


class Mixed(Base):
    """Has attributes beside a slot that it inherits."""


class Covered(Base):
    """Has a property in the place of a slot."""

    __slots__ = ("own",)

    def __init__(self, number: Any) -> None:
        self.own = number

    @property
    def number(self) -> Any:
        raise RuntimeError("not to be asked for")


def listed(number: int) -> Any:
    return np.array([[number], None], dtype=object)


MAKERS = {
    "a slotted dataclass": Slotted, "a frozen one": Frozen, "slots": Base, "inherited slots": Mixed,
    "a covered slot": Covered, "a slice": slice, "a range": range, "a set": lambda n: {n},
    "bytes": lambda n: bytearray([n]), "numbers in a row": lambda n: array.array("i", [n]),
    "an array": lambda n: np.array([n]), "an array of objects": listed, "numpy's number": np.int64,
}  # fmt: skip


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_values_are_told_apart_by_what_they_hold(make: Any) -> None:
    one, same, other = make(1), make(1), make(2)
    for form in (plainly, lambda value: contents([value])):
        assert form(one) == form(same)
        assert form(one) != form(other)
    assert are_told_alike(one, same)
    assert not are_told_alike(one, other)


def set_slot(held: Any) -> None:
    held.number = 2


CHANGED = {
    "a slot": (Slotted(1), set_slot),
    "a list in a frozen dataclass": (Frozen([1]), lambda held: held.number.append(2)),
    "bytes": (bytearray(b"a"), lambda held: held.append(1)),
    "a list in an array": (listed(1), lambda held: held[0].append(2)),
}


@pytest.mark.parametrize(("held", "change"), CHANGED.values(), ids=CHANGED)
def test_a_form_stays_as_it_was_made(held: Any, change: Any) -> None:
    held = copy.deepcopy(held)
    before = contents(held), contents([held])
    change(held)
    assert contents(held) != before[0]
    assert contents([held]) != before[1]


def test_what_a_value_keeps_for_itself_alone_is_no_part_of_it() -> None:
    path = pathlib.Path("a") / "b"
    before = plainly(path), contents([path])
    assert hash(path) == hash(pathlib.Path("a/b"))
    assert str(path)
    assert (plainly(path), contents([path])) == before
    assert parts(path) is None
