"""Saves a pipeline's weights and training state: every rank writes its own, one rename completes it.

How a directory appears at once is left to ``folder``, how tensors lie in a file to ``safetensors_file``, what
a rank saves to ``rank_contents``.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...errors import AutopipeError, StoreError
from ..files.folder import MANIFEST, Draft, forget_oldest, sync
from ..files.manifest import FORMAT, VERSION, FileRecord, Manifest, digest
from ..files.safetensors_file import Spec, TensorFile, of_text, text_of, write_tensors
from ..files.threads import threads_for
from ..wire.plain_values import dumps, loads
from .rank_contents import File, RankContents, SaveStatus, files_of, whole

__all__ = ["Exchange", "save", "save_single"]

INDEX = "model.safetensors.index.json"
Exchange = Callable[[SaveStatus], Sequence[SaveStatus]]
"""Brings what every rank tells to every rank, in their order."""


def save(
    path: pathlib.Path,
    contents: RankContents,
    rank: int,
    exchange: Exchange,
    n_kept: int | None = None,
    *,
    is_aside: bool = False,
) -> None:
    """Write the directory ``path``, all ranks together; whatever was there stays until all of it is written.

    ``is_aside``: this thread is beside one that trains, and takes no others from it.
    Raises :class:`StoreError` on every rank, saying what failed on which, and leaves the earlier save whole.
    """
    shards, state, fault = _files(contents)
    if not contents.writes:
        _assemble([*shards, *state])
        return
    draft: Draft | None = None
    mine = SaveStatus()
    try:
        if fault:
            raise StoreError(fault)
        if rank == 0:
            draft = Draft(path)
        mine = SaveStatus(draft=str(draft.path) if draft else "", n_shards=len(shards))
    except Exception as error:  # whatever it is, the others wait to be told
        mine = SaveStatus(fault=_fault(error))
    try:
        everyone = exchange(mine)
        if any(told.fault for told in everyone):
            _assemble([*shards, *state])  # replicas of this rank do
        _agree(everyone, path)
        before, total = sum(t.n_shards for t in everyone[:rank]), sum(t.n_shards for t in everyone)
        named = {f"model-{before + i + 1:05d}-of-{total:05d}.safetensors": f for i, f in enumerate(shards)}
        named |= {f"state-{rank + 1:05d}-of-{len(everyone):05d}.safetensors": f for f in state}
        written = _write(pathlib.Path(everyone[0].draft), named, is_aside=is_aside)
        everyone = _agree(exchange(written), path)
        done = SaveStatus()
        if draft is not None:
            try:
                _finish(draft, everyone, contents)
            except Exception as error:
                done = SaveStatus(fault=_fault(error))
        _agree(exchange(done), path)
    except BaseException:
        if draft is not None:
            draft.drop()
        raise
    if rank == 0 and n_kept is not None:
        forget_oldest(path.parent, n_kept, contents.steps)


def _files(contents: RankContents) -> tuple[list[File], list[File], str]:
    """The files of what a rank saves, or the fault for which there are none.

    With a fault too every replica of a rank comes to the same tensors in the same order: sharded ones are
    assembled by all of them together.
    """
    fault = contents.fault
    try:
        if not fault:
            return *files_of(contents), ""
    except Exception as error:  # whatever it is, the others wait to be told
        fault = _fault(error)
    return [File(dict(contents.weights))], [], fault


def _fault(error: BaseException) -> str:
    if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
        error = error.__context__  # torch's own file format ends in an error of its own where a write fails
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
    return (
        str(error) if isinstance(error, (AutopipeError, ValueError)) else f"{type(error).__name__}: {error}"
    )


def _agree(everyone: Sequence[SaveStatus], path: pathlib.Path) -> Sequence[SaveStatus]:
    faults = [
        f"rank {r}: {t.fault}" if len(everyone) > 1 else t.fault for r, t in enumerate(everyone) if t.fault
    ]
    if faults:
        raise StoreError(f"{path} was not saved, and what was there is as it was: {'; '.join(faults)}")
    return everyone


def _assemble(files: Iterable[File]) -> None:
    """Do a replica's part for the tensors of ``files`` that are sharded."""
    for file in files:
        for tensor in file.tensors.values():
            if hasattr(tensor, "full_tensor"):
                whole(tensor)


def _write(folder: pathlib.Path, named: Mapping[str, File], *, is_aside: bool = False) -> SaveStatus:
    """Write this rank's files; their records, or what failed.

    Sharded tensors are asked for to the last even after a failure: other ranks ask for them too.
    """
    records: dict[str, FileRecord] = {}
    sharded = [t for file in named.values() for t in file.tensors.values() if hasattr(t, "full_tensor")]
    n_asked = 0

    def value(tensor: Tensor) -> Tensor:
        nonlocal n_asked
        n_asked += hasattr(tensor, "full_tensor")
        return whole(tensor)

    try:
        for name, file in named.items():
            specs = {n: Spec.of(t) for n, t in file.tensors.items()}
            values = [functools.partial(value, t) for t in file.tensors.values()]
            if file.text is not None:
                text = folder / name.replace(".safetensors", ".json")
                records[text.name] = _write_text(text, file.text)
            if specs:
                note = {**file.note, "format": "pt", "autopipe": str(VERSION)}
                n_threads = 1 if is_aside else threads_for(sum(s.n_bytes for s in specs.values()))
                records[name] = FileRecord(*write_tensors(folder / name, specs, values, note, n_threads))
    except Exception as error:
        for tensor in sharded[n_asked:]:
            whole(tensor)
        return SaveStatus(fault=_fault(error))
    return SaveStatus(files=records)


def _write_text(path: pathlib.Path, text: str) -> FileRecord:
    data = text.encode()
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(len(data), zlib.crc32(data))


def _finish(draft: Draft, everyone: Sequence[SaveStatus], contents: RankContents) -> None:
    """Index, further texts and the manifest; then the rename."""
    files = {name: record for told in everyone for name, record in told.files.items()}
    for name in files:
        if not (draft.path / name).exists():
            raise StoreError(
                f"{name} was written but is not here: save in a folder on a file system that all ranks share"
            )
    weights = [name for name in files if name.startswith("model-")]
    opened = {name: TensorFile(draft.path / name, follows_links=False) for name in weights}
    specs = {n: entry.spec for file in opened.values() for n, entry in file.entries.items()}
    index = {
        "metadata": {"total_size": sum(spec.n_bytes for spec in specs.values())},
        "weight_map": {n: name for name, file in opened.items() for n in file.entries},
    }
    for name, text in {INDEX: json.dumps(index, indent=1), **contents.texts}.items():
        files[name] = _write_text(draft.path / name, text)
    states = [name for name in files if name.startswith("state-") and name.endswith(".json")]
    manifest = Manifest(
        format=FORMAT,
        version=VERSION,
        model=contents.model,
        digest=digest(specs),
        steps=contents.steps,
        seed=contents.seed,
        weights=weights,
        states=states,
        files=files,
    )
    with (draft.path / MANIFEST).open("xb") as file:
        file.write(manifest.to_bytes())
        file.flush()
        os.fsync(file.fileno())
    draft.commit()


# -- one file ---------------------------------------------------------------------------------------------


def save_single(
    path: pathlib.Path,
    contents: RankContents,
    rank: int,
    exchange: Exchange,
    names: Callable[[str], Sequence[str]],
) -> None:
    """Write one file that ``torch.load`` reads as the model's ``state_dict``, ties sharing their storage.

    Every rank writes its weights beside it first; the first one joins them without holding them.
    """
    if not contents.writes:
        _assemble([File(dict(contents.weights))])
        return
    parts: pathlib.Path | None = None
    mine = SaveStatus()
    try:
        if contents.fault:
            raise StoreError(contents.fault)
        tensors = {n: v for n, v in contents.state.items() if isinstance(v, Tensor)}
        rest = dumps(
            {n: v for n, v in contents.state.items() if n not in tensors}, lambda t, _: text_of(whole(t))
        )
        if path.is_symlink() or path.is_dir():
            raise StoreError(f"{path} is a {'link' if path.is_symlink() else 'folder'}; give a new file")
        if rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = Draft(path.parent / f".{path.name}")
            parts = draft.path
            mine = SaveStatus(draft=str(parts))
    except Exception as error:
        mine = SaveStatus(fault=_fault(error))
    try:
        everyone = exchange(mine)
        if any(told.fault for told in everyone):
            _assemble([File(dict(contents.weights))])  # replicas of this rank do
        folder = pathlib.Path(_agree(everyone, path)[0].draft)
        told = _write(folder, {f"{rank:05d}": File({**contents.weights, **tensors})})
        everyone = _agree(exchange(msgspec.structs.replace(told, extras=rest)), path)
        done = SaveStatus()
        if rank == 0:
            try:
                _join(folder, everyone, path, names)
            except Exception as error:
                done = SaveStatus(fault=_fault(error))
        _agree(exchange(done), path)
    finally:
        if parts is not None:
            draft.drop()


def _join(
    folder: pathlib.Path,
    everyone: Sequence[SaveStatus],
    path: pathlib.Path,
    names: Callable[[str], Sequence[str]],
) -> None:
    files = [name for told in everyone for name in told.files]
    merged: dict[str, Any] = {a: t for name in files for n, t in _mapped(folder / name) for a in names(n)}
    merged |= {n: v for told in everyone if told.extras for n, v in loads(told.extras, of_text).items()}
    with (folder / "joined").open("xb") as file:
        torch.save(merged, file)
        file.flush()
        os.fsync(file.fileno())
    (folder / "joined").replace(path)
    sync(path.parent)


def _mapped(path: pathlib.Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, mapped rather than read."""
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for name, entry in TensorFile(path).entries.items():
        spec = entry.spec
        if spec.n_bytes == 0:
            yield name, torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
            continue
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=spec.n_bytes, offset=entry.start)
        yield name, flat.view(spec.dtype).view(spec.shape)
