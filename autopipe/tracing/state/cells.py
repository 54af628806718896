"""Places that hold one value and are no container, read and written as a closure's cell is.

Slots of objects, context variables, the content of small arrays and of streams in memory. Finding them is
left to ``reach``.
"""

from __future__ import annotations

import contextvars
import io
import operator
import threading
import types
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = [
    "MOST_BYTES",
    "ArrayCell",
    "BytesCell",
    "Cell",
    "SlotCell",
    "StreamCell",
    "VariableCell",
    "attributes",
    "content",
    "contents",
    "place",
]

MOST_BYTES = 1 << 14
"""Larger arrays are tables, too long to be looked at in each call."""
_PLACE = 8
"""Bytes that say where in a stream one is."""


class SlotCell:
    """What an object keeps in one of its slots, whatever its class makes of reading and setting it."""

    __slots__ = ("owner", "slot")

    def __init__(self, owner: Any, slot: types.MemberDescriptorType) -> None:
        self.owner, self.slot = owner, slot

    @property
    def cell_contents(self) -> Any:
        try:
            return self.slot.__get__(self.owner)
        except AttributeError:
            raise ValueError("the slot is empty") from None

    @cell_contents.setter
    def cell_contents(self, value: Any) -> None:
        self.slot.__set__(self.owner, value)


class VariableCell:
    """What a context variable is set to where it is asked."""

    __slots__ = ("variable",)

    def __init__(self, variable: contextvars.ContextVar[Any]) -> None:
        self.variable = variable

    @property
    def cell_contents(self) -> Any:
        try:
            return self.variable.get()
        except LookupError:
            raise ValueError("the variable is not set") from None

    @cell_contents.setter
    def cell_contents(self, value: Any) -> None:
        self.variable.set(value)


class ArrayCell:
    """What a numpy array holds, as bytes."""

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array

    @staticmethod
    def is_for(array: np.ndarray[Any, Any]) -> bool:
        """Whether an array is small and of plain numbers."""
        return array.nbytes <= MOST_BYTES and not array.dtype.hasobject and array.flags.writeable

    @property
    def cell_contents(self) -> bytes:
        return self.array.tobytes()

    @cell_contents.setter
    def cell_contents(self, value: bytes) -> None:
        self.array[...] = np.frombuffer(value, self.array.dtype).reshape(self.array.shape)


class BytesCell(ArrayCell):
    """What a bytearray or an array of Python's own holds, as bytes; it may grow."""

    __slots__ = ()

    @property
    def cell_contents(self) -> bytes:
        return bytes(memoryview(self.array))

    @cell_contents.setter
    def cell_contents(self, value: bytes) -> None:
        del self.array[:]
        if isinstance(self.array, bytearray):
            self.array.extend(value)
        else:
            self.array.frombytes(value)


class StreamCell:
    """Where a stream in memory is read or written next and what it holds, as bytes."""

    __slots__ = ("stream",)

    def __init__(self, stream: io.StringIO | io.BytesIO) -> None:
        self.stream = stream

    @staticmethod
    def is_for(stream: io.StringIO | io.BytesIO) -> bool:
        """Whether a stream is open and holds little."""
        if stream.closed:
            return False
        if isinstance(stream, io.BytesIO):
            return len(stream.getbuffer()) <= MOST_BYTES
        return len(stream.getvalue()) <= MOST_BYTES

    @property
    def cell_contents(self) -> bytes:
        held = self.stream.getvalue()
        text = held if isinstance(held, bytes) else held.encode("utf-8", "surrogatepass")
        return self.stream.tell().to_bytes(_PLACE) + text

    @cell_contents.setter
    def cell_contents(self, value: bytes) -> None:
        held: Any = value[_PLACE:]
        self.stream.seek(0)
        self.stream.truncate()
        self.stream.write(
            held if isinstance(self.stream, io.BytesIO) else held.decode("utf-8", "surrogatepass")
        )
        self.stream.seek(int.from_bytes(value[:_PLACE]))


Cell = Any
"""One of these, or a closure's own cell: all have ``cell_contents``, which raises ValueError if empty."""


def content(cell: Cell, empty: Any = None) -> Any:
    """What a cell holds; ``empty`` where that is nothing."""
    try:
        return cell.cell_contents
    except ValueError:
        return empty


def contents(cells: Sequence[Cell]) -> list[Any]:
    """What some cells hold."""
    try:
        return [*map(_contents, cells)]
    except ValueError:
        return [*map(content, cells)]


_contents = operator.attrgetter("cell_contents")


def attributes(value: Any) -> dict[str, Any] | None:
    """An object's own attributes, whatever it does when it is asked for them; None where it has no place."""
    is_by_thread = issubclass(type(value), threading.local)
    try:
        held = value.__dict__ if is_by_thread else object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return held if isinstance(held, dict) else None


def place(cell: Cell) -> tuple[int, Any]:
    """What tells the place of a cell from others, whichever object stands for it."""
    for name in ("owner", "variable", "array", "stream"):
        if (held := getattr(cell, name, None)) is not None:
            return id(held), getattr(cell, "slot", None)
    return id(cell), None
