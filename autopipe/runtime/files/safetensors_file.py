"""One safetensors file: written in a single pass with a checksum for each tensor, read in place, checked.

Which tensors go into which file is left to ``saving``, what they are for to ``loading``. The layout is that
of the safetensors project: eight bytes of length, a JSON header, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import itertools
import json
import math
import mmap
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import accelerator
from ...errors import InputError, StoreError
from ...files import open_regular
from ..wire.plain_values import dtype_of, name_of
from .threads import in_threads

__all__ = [
    "Entry",
    "Spec",
    "TensorFile",
    "bytes_of",
    "has_nan",
    "is_plain",
    "of_text",
    "text_of",
    "write_tensors",
]

CHUNK_BYTES = 1 << 19
"""Read or written at once: small enough to be in the cache for its checksum."""
CONVERTED_BYTES = 1 << 23
"""Read at once on the way to another device or dtype."""
WRITE_BACK_BYTES = 1 << 23
"""After so many bytes the disk is told to begin, so that little is left to wait for at the end."""
MAX_HEADER_BYTES = 100 << 20
"""What the safetensors library allows."""

_NAMES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "C128": torch.complex128,
}
"""The last is ours: the library has no word for it."""
_DTYPES = {dtype: name for name, dtype in _NAMES.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """What is known of a tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        """Of a tensor, or of the whole that a DTensor is a shard of."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies in a file: from byte ``start`` to ``end`` of it."""

    spec: Spec
    start: int
    end: int


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; the tensor must outlive it."""
    flat = (
        accelerator.raw(tensor.detach())
        if tensor.numel()
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def is_plain(value: Any) -> bool:
    """Whether it is a dense tensor on the CPU, of numbers as they are."""
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided and value.device.type == "cpu"
    return is_dense and not value.is_quantized and not hasattr(value, "to_local")


def has_nan(tensor: Tensor) -> bool:
    """Whether any of its values is not a number."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    return bool(torch.isnan(tensor.float() if tensor.dtype.itemsize == 1 else tensor).any())


def text_of(tensor: Tensor) -> str:
    """A small, contiguous CPU tensor as text."""
    shape = "x".join(map(str, tensor.shape))
    return f"{name_of(tensor.dtype)}|{shape}|{base64.b64encode(bytes_of(tensor)).decode()}"


def of_text(text: str) -> Tensor:
    """The tensor of :func:`text_of`. Raises ``ValueError`` or ``RuntimeError`` for any other text."""
    dtype, shape, data = text.split("|")
    made = torch.empty([int(n) for n in shape.split("x") if n], dtype=dtype_of(dtype), device="cpu")
    bytes_of(made)[:] = base64.b64decode(data)
    return made


# -- writing ----------------------------------------------------------------------------------------------


def write_tensors(
    path: pathlib.Path,
    specs: Mapping[str, Spec],
    values: Iterable[Callable[[], Tensor]],
    note: Mapping[str, str],
    n_threads: int,
) -> tuple[int, int, dict[str, int]]:
    """Write a new file; ``values`` are called one by one for whole, contiguous CPU tensors.

    They are called in the caller's thread, and written in so many. Returns (bytes of the file, checksum of
    its header, checksum of each tensor). Raises ``OSError`` as the system does, :class:`InputError` for a
    dtype that files do not know.
    """
    head = _header(specs, note)
    starts = itertools.accumulate((s.n_bytes for s in specs.values()), initial=len(head))

    def jobs(fd: int) -> Iterator[Callable[[], int]]:
        for (name, spec), at, value in zip(specs.items(), starts, values, strict=False):
            view = bytes_of(value())
            if view.nbytes != spec.n_bytes:
                raise InputError(f"{name} has {view.nbytes} bytes where {spec} has {spec.n_bytes}")
            yield functools.partial(_write_all, fd, view, at)

    with path.open("xb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(head), 0)
        sums = dict(zip(specs, in_threads(jobs(file.fileno()), n_threads), strict=True))
        os.fsync(file.fileno())
    return len(head) + sum(s.n_bytes for s in specs.values()), zlib.crc32(head), sums


def _header(specs: Mapping[str, Spec], note: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(note)}
    at = 0
    for name, spec in specs.items():
        if name == "__metadata__":
            raise InputError("a tensor named __metadata__ cannot be kept: files of tensors use that name")
        if spec.dtype not in _DTYPES:
            raise InputError(f"{name} is {spec}; files of tensors know {', '.join(_NAMES)}")
        entries[name] = {
            "dtype": _DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.n_bytes],
        }
        at += spec.n_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_all(fd: int, view: memoryview, at: int) -> int:
    """Write all of ``view`` from byte ``at`` of a file on; its checksum."""
    crc, begun = 0, at
    for first in range(0, view.nbytes, CHUNK_BYTES):
        piece = view[first : first + CHUNK_BYTES]
        crc = zlib.crc32(piece, crc)
        while piece.nbytes:
            n_written = os.pwrite(fd, piece, at)
            piece, at = piece[n_written:], at + n_written
        if at - begun >= WRITE_BACK_BYTES:
            _begin_write_back(fd, begun, at - begun)
            begun = at
    return crc


def _begin_write_back(fd: int, at: int, n_bytes: int) -> None:
    """Have the system begin to write what it holds back of these bytes, where there is a call for it."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, at, n_bytes, os.POSIX_FADV_DONTNEED)


# -- reading ----------------------------------------------------------------------------------------------


class TensorFile:
    """An open file whose header has been checked against its size.

    Attributes
    ----------
    entries: by name. specs: what each is. note: what the header says beside them. n_bytes: of the file.
    header_sum: its checksum.
    """

    def __init__(self, path: pathlib.Path, *, follows_links: bool = True) -> None:
        """Raises :class:`StoreError` for what is no whole safetensors file."""
        self.path = path
        self._fd, self.n_bytes = open_regular(path, follows_links=follows_links)
        try:
            self._read_header()
        except OSError as error:
            raise self._damaged(f"it cannot be read: {error.strerror}") from error

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def _damaged(self, why: str) -> StoreError:
        return StoreError(f"{self.path} is damaged: {why}; use another checkpoint, or fetch this one again")

    def _read_header(self) -> None:
        first = os.pread(self._fd, 8, 0)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, self.n_bytes - 8):
            raise self._damaged(f"its header cannot be {length} bytes in a file of {self.n_bytes}")
        text = os.pread(self._fd, length, 8)
        self.header_sum = zlib.crc32(text, zlib.crc32(first))
        try:
            found = json.loads(text, object_pairs_hook=_no_doubles)
            self.note: dict[str, str] = found.pop("__metadata__", None) or {}
            if not isinstance(self.note, dict):
                raise ValueError("its note is no mapping")
            self.entries = {str(n): _entry(n, raw, 8 + length) for n, raw in found.items()}
            self.specs = {name: entry.spec for name, entry in self.entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._damaged(f"its header is not one of tensors: {error}") from error
        at = 8 + length
        for name, entry in sorted(self.entries.items(), key=lambda pair: (pair[1].start, pair[1].end)):
            if entry.start != at:
                raise self._damaged(f"{name} begins at byte {entry.start}, the one before ends at {at}")
            at = entry.end
        if at != self.n_bytes:
            raise self._damaged(f"its tensors end at byte {at}, the file at {self.n_bytes}")

    def checksum(self, name: str) -> int:
        """Of a tensor's bytes."""
        crc = 0
        for piece in self._pieces(name):
            crc = zlib.crc32(piece, crc)
        return crc

    def has_nan(self, name: str) -> bool:
        """Whether any of a tensor's values is not a number."""
        spec = self.entries[name].spec
        if not (spec.dtype.is_floating_point or spec.dtype.is_complex):
            return False
        return any(has_nan(torch.frombuffer(bytearray(p), dtype=spec.dtype)) for p in self._pieces(name))

    def _pieces(self, name: str) -> Iterator[memoryview]:
        entry = self.entries[name]
        # its own pages, so that none stay with the allocator
        buffer = memoryview(mmap.mmap(-1, max(1, min(CHUNK_BYTES, entry.end - entry.start))))
        for at in range(entry.start, entry.end, CHUNK_BYTES):
            piece = buffer[: min(CHUNK_BYTES, entry.end - at)]
            self._fill(piece, at)
            yield piece

    def read(self, name: str) -> Tensor:
        """A whole tensor, on the CPU."""
        spec = self.entries[name].spec
        made = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
        self.read_into(name, made, [0] * len(spec.shape))
        return made

    def read_into(self, name: str, out: Tensor, offsets: Sequence[int]) -> None:
        """Fill ``out`` with the part of a tensor that begins at ``offsets`` and has its shape.

        Straight into its memory where that is on the CPU, contiguous and of the file's dtype, else by way
        of a buffer of some MiB.
        """
        if not out.is_contiguous():
            whole = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            self.read_into(name, whole, offsets)
            with torch.no_grad():
                out.copy_(whole)
            return
        entry, flat = self.entries[name], out.detach().view(-1)
        is_direct = out.device.type == "cpu" and out.dtype == entry.spec.dtype
        for first, run in _runs(entry.spec.shape, offsets, out.shape):
            at = entry.start + first * entry.spec.dtype.itemsize
            if is_direct:
                self._fill(bytes_of(flat[run]), at)
            else:
                self._convert(flat[run], at, entry.spec.dtype)
        torch.autograd.graph.increment_version(out)

    def _convert(self, flat: Tensor, at: int, dtype: torch.dtype) -> None:
        """Fill a flat tensor of another dtype or device, piece by piece."""
        for piece in flat.split(CONVERTED_BYTES // dtype.itemsize):
            read = torch.empty(piece.shape, dtype=dtype, device="cpu")
            self._fill(bytes_of(read), at)
            piece.copy_(read)
            at += read.nbytes

    def _fill(self, piece: memoryview, at: int) -> None:
        while piece.nbytes:
            n = os.preadv(self._fd, [piece], at)
            if n == 0:
                raise self._damaged(f"it ends at byte {at}")
            piece, at = piece[n:], at + n


def _runs(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Where the rows of a part lie in the whole, by element: (first in the whole, slice of the flat part)."""
    if math.prod(sizes) == 0:
        return
    split = len(shape)
    while split and sizes[split - 1] == shape[split - 1]:
        split -= 1  # trailing dims that are taken whole
    split = max(0, split - 1)
    run = math.prod(sizes[split:])
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    base = sum(o * s for o, s in zip(offsets, strides, strict=True))
    for i, place in enumerate(np.ndindex(*sizes[:split])):
        first = base + sum(p * s for p, s in zip(place, strides, strict=False))
        yield first, slice(i * run, (i + 1) * run)


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name comes twice")
    return made


def _entry(name: str, raw: Any, offset: int) -> Entry:
    if set(raw) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} is described by {', '.join(map(str, raw))}")
    start, end = raw["data_offsets"]
    sizes = [*raw["shape"], start, end]
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in sizes) or raw["dtype"] not in _NAMES:
        raise ValueError(f"{name} cannot be a {raw['dtype']} of {raw['shape']}")
    spec = Spec(tuple(raw["shape"]), _NAMES[raw["dtype"]])
    if end - start != spec.n_bytes:
        raise ValueError(f"{name}, {spec}, cannot be {end - start} bytes")
    return Entry(spec, offset + start, offset + end)
