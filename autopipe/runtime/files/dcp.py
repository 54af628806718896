"""Reads the own layout of ``torch.distributed.checkpoint``: ``.metadata`` and files of pickled tensors.

What of it is a model's and what an optimizer's is left to ``loading``. ``.metadata`` is a pickle: it is read
here by hand of a list of what a description of tensors is made of, and nothing it names is imported.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
import pathlib
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import StoreError
from ...files import open_regular
from .safetensors_file import Spec, has_nan, is_plain
from .torch_save import fault_of

__all__ = ["MAX_METADATA_BYTES", "METADATA", "Distcp"]

METADATA = ".metadata"
MAX_METADATA_BYTES = 1 << 28
MAX_DIMS = 64
MAX_DEPTH = 64
SLACK_BYTES = 1 << 20
"""What a pickled tensor may take beside its values."""

_PARTS = frozenset(
    (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
        "_StorageInfo",
    )
)
"""Classes of ``torch.distributed.checkpoint`` that a description is made of."""
# fmt: off
_OPCODES = frozenset((
    "PROTO", "FRAME", "STOP", "MARK", "POP", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET",
    "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "NEWOBJ", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1",
    "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_DICT", "SETITEM", "SETITEMS",
    "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
))
# fmt: on
"""What Python's pickler writes of such; among them are none that make much of few bytes."""


class _Part:
    """An object of a description: nothing but what was said of it."""

    kind = ""
    said: Any = None

    def __init__(self, *args: Any) -> None:
        self.said = args

    def __setstate__(self, state: Any) -> None:
        self.said = state

    def of(self, kind: str) -> Mapping[str, Any]:
        """Its attributes. Raises ``ValueError`` where it is of another kind."""
        if self.kind != kind or not isinstance(self.said, dict):
            raise ValueError(f"a {self.kind} where {kind} belongs")
        return self.said


_KINDS = {name: type(name, (_Part,), {"kind": name}) for name in (*_PARTS, "path", "constant")}


class _Reader(pickle.Unpickler):
    """Makes plain values and parts."""

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a global; ``pickle.UnpicklingError`` for whatever is not of a description."""
        if module.startswith("torch.distributed.checkpoint.") and name in _PARTS:
            return _KINDS[name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        known = _STAND_INS.get((module, name))
        if known is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no description of tensors has")
        return known


def _text(value: object = "") -> str:
    return value if isinstance(value, str) else ""


_STAND_INS: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _text,
    ("collections", "OrderedDict"): dict,
    ("builtins", "getattr"): _KINDS["constant"],
    **{(m, n): _KINDS["path"] for m in ("pathlib", "pathlib._local") for n in ("PosixPath", "WindowsPath")},
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Bytes of a file."""

    file: str
    offset: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunk:
    """A box of a tensor: where in it, how large, and where its values are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: _Place

    def shared(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
        """In each dim (first, end) of what it has of another box, in the tensor's numbers."""
        dims = zip(self.offsets, self.sizes, offsets, sizes, strict=True)
        return [(max(a, b), min(a + n, b + m)) for a, n, b, m in dims]


class Distcp:
    """An open checkpoint, its description checked; behind what a :class:`TensorFile` has to read.

    Attributes
    ----------
    path: the folder. specs: of each tensor, by its flat name.
    """

    def __init__(self, path: pathlib.Path, description: bytes) -> None:
        """``description`` is what ``.metadata`` holds. Raises :class:`StoreError` for what is not whole."""
        self.path = path
        self.note: dict[str, str] = {}
        self.specs: dict[str, Spec] = {}
        self._chunks: dict[str, list[_Chunk]] = {}
        self._pickled: dict[str, _Place] = {}
        self._files: dict[str, tuple[int, int]] = {}
        self._whole: set[_Place] = set()
        self._last: tuple[_Place, Tensor] | None = None
        try:
            self._read(description)
        except StoreError:
            raise
        except Exception as error:  # a damaged or hostile pickle ends in any error there is
            raise self._damaged(f"{METADATA} describes no tensors: {error}") from error

    def __del__(self) -> None:
        for fd, _ in getattr(self, "_files", {}).values():
            os.close(fd)

    def _damaged(self, why: str) -> StoreError:
        return StoreError(f"{self.path} cannot be read: {why}; use another checkpoint, or fetch it again")

    # -- the description ----------------------------------------------------------------------------

    def _read(self, data: bytes) -> None:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name not in _OPCODES or ("PUT" in opcode.name and int(argument or 0) > len(data)):
                raise ValueError(f"{opcode.name} has no place in it")
        found = _Reader(io.BytesIO(data)).load().of("Metadata")
        places = dict(_places(found["storage_data"]))
        n_chunks = 0
        for name, part in found["state_dict_metadata"].items():
            if part.kind == "BytesStorageMetadata":
                self._pickled[_named(name)] = places[name, None]
                continue
            spec, boxes = _tensor(part.of("TensorStorageMetadata"))
            n_chunks += len(boxes)
            if n_chunks > len(places):
                raise ValueError("it has more parts of tensors than places for them")
            self._chunks[_named(name)] = [_Chunk(at, size, places[name, at]) for at, size in boxes]
            self.specs[name] = spec
            _check_cover(name, spec, self._chunks[name])
        for place in (*self._pickled.values(), *(c.place for each in self._chunks.values() for c in each)):
            self._open(place)
        paths = found.get("planner_data")
        self._paths = dict(_paths((*self.specs, *self._pickled), paths if isinstance(paths, dict) else {}))

    def _open(self, place: _Place) -> int:
        if place.file not in self._files:
            self._files[place.file] = open_regular(self.path / place.file, follows_links=False)
        fd, n_bytes = self._files[place.file]
        if place.offset + place.length > n_bytes:
            raise self._damaged(f"{place.file} has {n_bytes} bytes, and should have more")
        return fd

    def tree(self, take: Callable[[str], Any]) -> dict[str, Any]:
        """What was saved, nested as it was; ``take`` gives what stands for the tensor of a flat name."""
        root: dict[Any, Any] = {}
        for name, path in self._paths.items():
            at = root
            for key in path[:-1]:
                at = at.setdefault(key, {})
                if not isinstance(at, dict):
                    raise self._damaged(f"{name} lies within another value")
            if path[-1] in at:
                raise self._damaged(f"{name} comes twice")
            at[path[-1]] = take(name) if name in self.specs else self._value(name)
        return {str(key): _listed(value) for key, value in root.items()}

    def _value(self, name: str) -> Any:
        """A value that is no tensor."""
        return self._loaded(name, self._pickled[name])

    # -- values -------------------------------------------------------------------------------------

    def has_nan(self, name: str) -> bool:
        """Whether any of a tensor's values is not a number; reads it all."""
        return sum(has_nan(self._values(name, chunk)) for chunk in self._chunks[name]) > 0

    def read(self, name: str) -> Tensor:
        """A whole tensor, on the CPU."""
        spec = self.specs[name]
        made = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
        self.read_into(name, made, [0] * len(spec.shape))
        return made

    @torch.no_grad()
    def read_into(self, name: str, out: Tensor, offsets: Sequence[int]) -> None:
        """Fill ``out`` with the part of a tensor that begins at ``offsets`` and has its shape."""
        for chunk in self._chunks[name]:
            both = chunk.shared(offsets, out.shape)
            if any(first >= end for first, end in both):
                continue
            source, target = self._values(name, chunk), out
            for dim, (first, end) in enumerate(both):
                source = source.narrow(dim, first - chunk.offsets[dim], end - first)
                target = target.narrow(dim, first - offsets[dim], end - first)
            target.copy_(source)

    def _values(self, name: str, chunk: _Chunk) -> Tensor:
        if self._last is not None and self._last[0] == chunk.place:
            return self._last[1]
        self._last = None
        spec = Spec(chunk.sizes, self.specs[name].dtype)
        if chunk.place.length > spec.n_bytes + SLACK_BYTES:
            raise self._damaged(f"{name} takes {chunk.place.length} bytes, and has {spec.n_bytes}")
        found = self._loaded(name, chunk.place)
        if not is_plain(found) or Spec.of(found) != spec:
            raise self._damaged(f"what it holds of {name} is not {spec}")
        self._last = chunk.place, found
        return found

    def _loaded(self, name: str, place: _Place) -> Any:
        """What was pickled there, if that is tensors and plain values."""
        window = io.BufferedReader(_Window(self._open(place), place.offset, place.length))
        try:
            if place not in self._whole:
                _check_archive(window, place)
                self._whole.add(place)
            window.seek(0)
            return torch.load(window, map_location="cpu", weights_only=True)
        except Exception as error:  # of a damaged or hostile pickle
            raise self._damaged(f"{name} in {place.file}: {fault_of(error)}") from error


class _Window(io.RawIOBase):
    """Bytes ``offset`` to ``offset + length`` of an open file, as a file."""

    def __init__(self, fd: int, offset: int, length: int) -> None:
        self._fd, self._offset, self._length, self._at = fd, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        n_read = os.preadv(self._fd, [view], self._offset + self._at) if view.nbytes else 0
        self._at += n_read
        return n_read


def _check_archive(window: Any, place: _Place) -> None:
    """Raise ``ValueError`` where an archive is damaged, or would be larger unpacked."""
    with zipfile.ZipFile(window) as archive:
        if any(
            i.compress_type != zipfile.ZIP_STORED or i.file_size > place.length for i in archive.infolist()
        ):
            raise ValueError("it is packed")
        bad = archive.testzip()
    if bad is not None:
        raise ValueError(f"{bad} does not fit its checksum")


# -- parts of the description ---------------------------------------------------------------------------


def _named(name: Any) -> str:
    if type(name) is not str:
        raise ValueError(f"{name!r} is no name")
    return name


def _sizes(found: Any) -> tuple[int, ...]:
    if type(found) is not tuple or len(found) > MAX_DIMS:
        raise ValueError("a shape is no shape")
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in found):
        raise ValueError(f"{found} is no shape")
    return found


def _places(storage: Mapping[Any, Any]) -> Iterator[tuple[tuple[str, tuple[int, ...] | None], _Place]]:
    """(name, offsets or None) → where it is."""
    for index, value in storage.items():
        key, info = index.of("MetadataIndex"), value.of("_StorageInfo")
        file, offset, length = info["relative_path"], info["offset"], info["length"]
        if pathlib.PurePath(_named(file)).name != file or file in ("", ".."):
            raise ValueError(f"{file!r} is no name of a file beside it")
        _sizes((offset, length))
        if info.get("transform_descriptors"):
            raise ValueError(f"{file} is packed by an extension ({info['transform_descriptors']})")
        at = key.get("offset")
        yield (_named(key["fqn"]), None if at is None else _sizes(at)), _Place(file, offset, length)


def _tensor(said: Mapping[str, Any]) -> tuple[Spec, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A tensor, and (offsets, sizes) of its chunks."""
    properties = said["properties"]
    if properties.kind != "TensorProperties" or not isinstance(properties.said[0], torch.dtype):
        raise ValueError("a tensor has no dtype")
    boxes = [part.of("ChunkStorageMetadata") for part in said["chunks"]]
    spec = Spec(_sizes(said["size"]), properties.said[0])
    return spec, [(_sizes(box["offsets"]), _sizes(box["sizes"])) for box in boxes]


def _check_cover(name: str, spec: Spec, chunks: Sequence[_Chunk]) -> None:
    """Raise ``ValueError`` where chunks do not make up the tensor, each value once."""
    for chunk in chunks:
        ends = [a + n for a, n in zip(chunk.offsets, chunk.sizes, strict=True)]
        if len(ends) != len(spec.shape) or any(e > n for e, n in zip(ends, spec.shape, strict=True)):
            raise ValueError(f"a part of {name} lies outside of it")
    if sum(math.prod(c.sizes) for c in chunks) != math.prod(spec.shape):
        raise ValueError(f"parts of {name} are missing, or come twice")
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    along = max(range(len(spec.shape)), key=lambda d: len({c.offsets[d] for c in filled}), default=0)
    open_ones: list[_Chunk] = []
    for chunk in sorted(filled, key=lambda c: c.offsets[along : along + 1]):
        open_ones = [c for c in open_ones if _reaches(c, chunk, along)]
        if any(all(a < b for a, b in chunk.shared(c.offsets, c.sizes)) for c in open_ones):
            raise ValueError(f"parts of {name} overlap")
        open_ones.append(chunk)


def _reaches(chunk: _Chunk, later: _Chunk, dim: int) -> bool:
    return not later.offsets or chunk.offsets[dim] + chunk.sizes[dim] > later.offsets[dim]


def _paths(names: Sequence[str], told: Mapping[Any, Any]) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    for name in names:
        path = told.get(name, (name,))
        if type(path) is not tuple or not 0 < len(path) <= MAX_DEPTH:
            raise ValueError(f"the place of {name} is none")
        if not all(type(key) in (str, int) for key in path):
            raise ValueError(f"the place of {name} is none")
        yield name, path


def _listed(value: Any) -> Any:
    """Mappings whose keys count up from 0 are lists again."""
    if not isinstance(value, dict):
        return value
    made = {key: _listed(item) for key, item in value.items()}
    if made and all(type(key) is int for key in made) and sorted(made) == list(range(len(made))):
        return [made[i] for i in range(len(made))]
    return {str(key): item for key, item in made.items()}
