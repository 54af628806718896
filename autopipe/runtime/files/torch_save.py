"""Reads one file of ``torch.save``: nothing but tensors, numbers and texts is ever loaded.

What the tensors are for is left to ``loading``.
"""

from __future__ import annotations

import os
import pathlib
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import StoreError
from ...files import open_regular, unreadable
from .safetensors_file import Spec, has_nan, is_plain
from .stored_tensor import is_extra

__all__ = ["Pickled", "fault_of", "unpickled"]


def unpickled(path: pathlib.Path, *, stays: bool = False) -> Any:
    """What a file of ``torch.save`` holds. Raises :class:`StoreError` for more than plain values.

    Tensors are read when they are first used of a file that ``stays`` as it is, else at once.
    """
    os.close(open_regular(path)[0])
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                bad = archive.testzip()
            if bad is not None:
                raise StoreError(f"{path} is damaged: {bad} in it does not fit its checksum; use another")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old and odd forms, which are told below or fit
            is_mapped = stays and zipfile.is_zipfile(path)
            return torch.load(path, map_location="cpu", mmap=is_mapped, weights_only=True)
    except StoreError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    except Exception as error:  # a damaged or hostile pickle ends in any error there is
        raise StoreError(
            f"{path} cannot be read as tensors: {fault_of(error)}; nothing but tensors, numbers and texts is "
            "ever loaded: save a state_dict of those"
        ) from error


def fault_of(error: Exception) -> str:
    """In words, why a pickle was not read. Where torch refuses code, not its advice on how to run that."""
    if isinstance(error, pickle.UnpicklingError):
        named = re.search(r"\bGLOBAL ([\w.]+)", str(error))
        return f"to load it would run {named[1]}" if named else "it is no pickle of such"
    return f"{type(error).__name__}: {''.join(str(error).strip().splitlines()[:1])}"


class Pickled:
    """The tensors of a file that ``torch.save`` wrote, behind what a :class:`TensorFile` has to read."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.note: dict[str, str] = {}
        found = unpickled(path, stays=True)
        if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
            raise StoreError(
                f"{path} holds no mapping of names to tensors, as a model's state_dict is; save that"
            )
        self.extras = {name: value for name, value in found.items() if is_extra(name)}
        self._tensors = {name: value for name, value in found.items() if name not in self.extras}
        odd = [name for name, value in self._tensors.items() if not is_plain(value)]
        inner = max(
            (name for name in odd if isinstance(found[name], Mapping)),
            key=lambda name: sum(map(is_plain, found[name].values())),  # an optimizer's holds none itself
            default=None,
        )
        if inner is not None:
            raise StoreError(
                f"{path} holds more than a model's state_dict, which may be what it has under {inner!r}; "
                f"save that by itself: torch.save(torch.load(path)[{inner!r}], another), and load that"
            )
        if odd:
            raise StoreError(
                f"{path} has {odd[0]!r}, which is no dense tensor with values, as a model's state_dict has"
            )
        self.specs = {name: Spec.of(t) for name, t in self._tensors.items()}

    @property
    def names(self) -> tuple[str, ...]:
        return *self._tensors, *self.extras

    def has_nan(self, name: str) -> bool:
        """Whether any of a tensor's values is not a number."""
        return has_nan(self._tensors[name])

    def read_into(self, name: str, out: Tensor, offsets: Sequence[int]) -> None:
        """Fill ``out`` with the part of a tensor that begins at ``offsets`` and has its shape."""
        part = self._tensors[name]
        for dim, (first, size) in enumerate(zip(offsets, out.shape, strict=True)):
            part = part.narrow(dim, first, size)
        with torch.no_grad():
            out.copy_(part)

    def read(self, name: str) -> Tensor:
        """A whole tensor, on the CPU."""
        return self._tensors[name].clone()
