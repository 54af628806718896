"""Reasons to record again from the start: what a graph cannot hold was met, and something would help.

Acting on them is left to ``session``. None is an :class:`Exception`, so that the model's own handlers let
them pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "CloseModule",
    "FollowCasts",
    "Function",
    "HoldNumbers",
    "KeepFunction",
    "KeepMode",
    "KeepReads",
    "Method",
    "OpenLeaf",
    "PutBack",
    "Restart",
    "Statement",
    "TellMethod",
    "WatchLeaves",
    "WatchMethods",
]


class Restart(BaseException):
    """Recording must start again."""


class _AtModule(Restart):
    """``path`` is the module's, ``why`` says what stood in the way."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(why)
        self.path, self.why = path, why


class CloseModule(_AtModule):
    """With the module kept whole."""


class OpenLeaf(_AtModule):
    """With the leaf opened, and ``with_alike`` those of its class."""

    def __init__(self, path: str, why: str, *, with_alike: bool = False) -> None:
        super().__init__(path, why)
        self.with_alike = with_alike


class KeepFunction(_AtModule):
    """With a plain function, a method or a statement kept whole that runs in the module at ``path``."""

    def __init__(self, function: Function | Method | Statement, path: str, why: str) -> None:
        super().__init__(path, why)
        self.function = function


class KeepReads(Restart):
    """With the function kept whole that reads data at ``source``, instead of asking what it reads."""

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.source = source


class KeepMode(Restart):
    """With the leaf at ``path`` called in the modes and with the weights frozen that code around it sets."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class PutBack(Restart):
    """With parameters, by name, put back after each run as small ones are: the model writes to them."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        super().__init__(*self.names)


class FollowCasts(Restart):
    """With the casts followed that the code of a module makes of numbers."""

    def __init__(self, module: str) -> None:
        super().__init__(module)
        self.module = module


class WatchMethods(Restart):
    """Watching the methods of the module at ``path`` in a leaf: code outside sets what its calls go by."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class TellMethod(Restart):
    """With calls of a method recorded, by which code outside sets what a leaf's calls go by."""

    def __init__(self, path: str, name: str) -> None:
        super().__init__(path, name)
        self.path, self.name = path, name


class HoldNumbers(Restart):
    """With numbers that attributes hold as inputs: by path and name, what they are and what a call leaves."""

    def __init__(self, numbers: Mapping[str, tuple[Any, Any]]) -> None:
        super().__init__(", ".join(numbers))
        self.numbers = numbers


class WatchLeaves(Restart):
    """Watching what leaves make: a tensor of unknown origin turned up."""


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """A function by the module-level name under which glue code calls it.

    ``is_held``: code calls it as an attribute or a dict holds it; the name is that in its own file.
    """

    module: str
    name: str
    is_held: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Method:
    """A method by its name and the path of the module whose it is."""

    path: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Statement:
    """A statement of the forward of the module at ``path``, by where it starts in its file."""

    path: str
    line: int
    column: int
