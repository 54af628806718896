"""A tensor of a checkpoint that has not been read, and what every kind of file has to do for it.

The kinds are left to ``safetensors_file``, ``dcp`` and ``loading``.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from .safetensors_file import Spec

__all__ = ["EXTRA", "Source", "Stored", "is_extra"]

EXTRA = "_extra_state"
"""The last part of the name in a ``state_dict`` of what a module keeps that is no parameter and no buffer."""


def is_extra(name: str) -> bool:
    """Whether a name in a ``state_dict`` is of such state."""
    return name.rpartition(".")[2] == EXTRA


class Source(Protocol):
    """An open file, or files, of tensors."""

    path: pathlib.Path
    note: dict[str, str]
    specs: dict[str, Spec]

    def has_nan(self, name: str) -> bool: ...
    def read(self, name: str) -> Tensor: ...
    def read_into(self, name: str, out: Tensor, offsets: Sequence[int]) -> None: ...


class Stored:
    """A tensor of a checkpoint that has not been read: where it is, and whether numpy's or a parameter.

    ``trains`` is None where it was none, else whether that required a gradient.
    """

    __slots__ = ("file", "is_array", "name", "trains")

    def __init__(self, file: Source, name: str, is_array: bool = False, trains: bool | None = None) -> None:
        self.file, self.name, self.is_array, self.trains = file, name, is_array, trains

    def numpy(self) -> Stored:
        """The same, to be read as an array."""
        return Stored(self.file, self.name, True)

    def parameter(self, trains: bool) -> Stored:
        """The same, to be read as a parameter."""
        return Stored(self.file, self.name, trains=trains)

    def read(self) -> Any:
        """The tensor, array or parameter."""
        tensor = self.file.read(self.name)
        if self.trains is not None:
            return nn.Parameter(tensor, self.trains)
        return tensor.numpy() if self.is_array else tensor

    @property
    def spec(self) -> Spec:
        return self.file.specs[self.name]
