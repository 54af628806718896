"""Values are told apart by what they hold, wherever they hold it, and forms of them stay as they are."""

from __future__ import annotations

import array
import copy
import dataclasses
import functools
import pathlib
import pickle
from typing import Any

import numpy as np
import pytest
import torch

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


class Called:
    def __init__(self, number: Any) -> None:
        self.number = number

    def __call__(self) -> Any:
        return self.number


def in_a_ring(number: int) -> Any:
    ring: list[Any] = [number]
    ring.append({"back": ring})
    return ring


def deep(number: Any) -> Any:
    for _ in range(3000):
        number = [number]
    return number


BESIDE = [1]


def named() -> Any:
    return BESIDE


def with_torch() -> Any:
    return torch.add if LAYER.training else pathlib.Path


LAYER = torch.nn.Linear(1, 1)


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


WITHIN = {
    "deep data": deep, "an object that is called": Called, "a ring": in_a_ring,
    "a function around a number": lambda n: lambda: n, "a function with a default": lambda n: lambda m=n: m,
    "which function it is": lambda n: [len, sum][n - 1], "which class it is": lambda n: [int, str][n - 1],
    "a tensor": lambda n: torch.full((2,), float(n)), "whether it is a truth": lambda n: [True, 1][n - 1],
}  # fmt: skip


@pytest.mark.parametrize("make", WITHIN.values(), ids=WITHIN)
def test_contents_are_told_apart_however_far_they_lie(make: Any) -> None:
    one, same, other = (contents([Slotted(make(n))]) for n in (1, 1, 2))
    assert one == same
    assert one != other


def test_objects_that_are_one_in_two_places_hold_what_two_equal_ones_do() -> None:
    one = [1]
    assert contents([one, one]) == contents([[1], [1]])
    assert contents([one, one]) != contents([[1], [2]])


def test_a_function_holds_the_globals_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(named)
    assert contents(named) == before
    monkeypatch.setitem(globals(), "BESIDE", [2])
    assert contents(named) != before


def test_contents_are_copied_and_pickled_whatever_a_function_names() -> None:
    held = contents(with_torch)
    assert copy.deepcopy(held) == held == contents(with_torch)
    of_a_module = contents([functools.partial(pathlib.Path), {"b", "a"}, lambda: torch.add])
    assert pickle.loads(pickle.dumps(of_a_module)) == of_a_module


def test_equal_sets_hold_the_same_however_they_were_filled() -> None:
    assert contents([{*(-1, -2)}]) == contents([{*(-2, -1)}])
    assert contents([{-1, -2}]) != contents([{-1, -3}])


def test_attributes_beside_items_are_held_but_for_what_is_made_again() -> None:
    class Held(dict[str, int]):
        @functools.cached_property
        def total(self) -> int:
            return sum(self.values())

    held = Held(a=1)
    before = contents(held)
    assert held.total == 1
    assert contents(held) == before
    held.kind = "b"  # type: ignore[attr-defined]
    assert contents(held) != before
