"""What a checkpoint says of itself: its files, their sizes and checksums, the model, the step.

Tensors are left to ``safetensors_file``, drafting and renaming to ``folder``.
"""

from __future__ import annotations

import hashlib
import pathlib
import stat
import zlib
from collections.abc import Mapping
from typing import Annotated

import msgspec

from ...errors import StoreError
from ...files import read_bytes
from .folder import MANIFEST
from .safetensors_file import Spec, TensorFile

__all__ = [
    "FORMAT",
    "MAX_TEXT_BYTES",
    "VERSION",
    "FileRecord",
    "Manifest",
    "digest",
    "open_files",
    "read_manifest",
]

FORMAT, VERSION = "autopipe checkpoint", 2
LOADABLE = (".safetensors", ".bin", ".pt", ".pth", ".distcp")
"""Files that some loader might take for weights: a checkpoint holds none that it does not list."""
MAX_TEXT_BYTES = 1 << 30
Count = Annotated[int, msgspec.Meta(ge=0)]


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file: its size, the checksum of its header (or of all of it), and of each tensor in it."""

    n_bytes: Count
    checksum: Count
    tensors: dict[str, Count] = {}


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole checkpoint.

    ``model`` names the class, ``digest`` says which weights of which shapes it has. ``weights`` are the
    files of weights and ``states`` those of training state, in the order of the ranks; the tensors of a state
    are in the file of its stem. ``checksum`` is of the rest.
    """

    format: str
    version: int
    model: str
    digest: str
    steps: Count
    seed: Count
    weights: list[str]
    states: list[str]
    files: dict[str, FileRecord]
    checksum: int = 0

    def to_bytes(self) -> bytes:
        """As it is kept, its own checksum included."""
        bare = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(self, checksum=0)), indent=1)
        sealed = msgspec.structs.replace(self, checksum=zlib.crc32(bare))
        return msgspec.json.format(msgspec.json.encode(sealed), indent=1)


def digest(specs: Mapping[str, Spec]) -> str:
    """Of a model's weights: names, shapes and dtypes."""
    text = "\n".join(f"{name} {specs[name]}" for name in sorted(specs))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_manifest(path: pathlib.Path) -> Manifest:
    """The manifest of the checkpoint in ``path``. Raises :class:`StoreError` for any but a whole one."""
    data = read_bytes(path / MANIFEST, MAX_TEXT_BYTES, follows_links=False)
    try:
        head = msgspec.json.decode(data)
        known = isinstance(head, dict) and head.get("format") == FORMAT
        if known and head.get("version") != VERSION:
            raise StoreError(
                f"{path} is of format version {head.get('version')}; this autopipe reads version {VERSION}"
            )
        found = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise StoreError(f"{path / MANIFEST} is no manifest of a checkpoint: {error}; use another") from error
    if not known or found.to_bytes() != data:
        raise StoreError(f"{path / MANIFEST} is damaged: its checksum does not fit; use another checkpoint")
    plain = all(pathlib.PurePath(n).name == n and n not in (".", "..", MANIFEST) for n in found.files)
    ends = all(n.endswith(".safetensors") for n in found.weights) and all(
        n.endswith(".json") for n in found.states
    )
    if (
        max(found.steps, found.seed) >= 1 << 64
        or not plain
        or not ends
        or not {*found.weights, *found.states} <= set(found.files)
    ):
        raise StoreError(f"{path / MANIFEST} says what no checkpoint's own can; use another")
    return found


def open_files(path: pathlib.Path, manifest: Manifest) -> dict[str, TensorFile]:
    """The tensor files of a checkpoint, open, headers as the manifest says; small files are checked whole.

    Raises :class:`StoreError` listing what is missing, damaged, or there beyond what is listed.
    """
    faults = []
    opened: dict[str, TensorFile] = {}
    present = {entry.name for entry in path.iterdir()}
    for name, record in manifest.files.items():
        if name not in present:
            faults.append(f"{name} is missing")
        elif not stat.S_ISREG((path / name).lstat().st_mode):
            faults.append(f"{name} is no regular file")
        elif (n_bytes := (path / name).lstat().st_size) != record.n_bytes:
            faults.append(f"{name} has {n_bytes} bytes and should have {record.n_bytes}")
        elif not name.endswith(".safetensors"):
            if zlib.crc32(read_bytes(path / name, MAX_TEXT_BYTES, follows_links=False)) != record.checksum:
                faults.append(f"{name} is damaged")
        else:
            opened[name] = file = TensorFile(path / name, follows_links=False)
            if file.header_sum != record.checksum or set(file.entries) != set(record.tensors):
                faults.append(f"{name} has another header")
    foreign = sorted(n for n in present - set(manifest.files) if n.endswith(LOADABLE))
    faults += [f"{name} is not of this checkpoint" for name in foreign]
    if faults:
        raise StoreError(
            f"{path} is not the checkpoint it was saved as: {'; '.join(faults[:5])}; use another"
        )
    specs = {n: e.spec for name in manifest.weights for n, e in opened[name].entries.items()}
    if digest(specs) != manifest.digest:
        raise StoreError(f"{path} holds other weights than its manifest says; use another checkpoint")
    return opened
