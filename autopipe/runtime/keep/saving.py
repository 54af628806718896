"""Saves a pipeline's weights and training state: every rank writes its own, one rename completes it.

How a directory appears at once is left to ``folder``, how tensors lie in a file to ``tensorfile``, who
owns what to ``runtime``.
"""

from __future__ import annotations

import dataclasses
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
from ...stages import Stage
from ..wire.values import Unfit, dumps, loads
from .extra import named_tensors
from .folder import MANIFEST, Draft, forget_oldest, sync
from .manifest import FORMAT, VERSION, FileRecord, Manifest, digest
from .tensorfile import Spec, TensorFile, is_plain, of_text, text_of, write_tensors
from .threads import in_threads, threads_for

__all__ = ["INDEX", "Cargo", "Exchange", "Told", "owned", "save", "save_single", "staged", "whole"]

INDEX = "model.safetensors.index.json"


class Told(msgspec.Struct, frozen=True):
    """What a rank tells the others while they save: a fault, or how far it is.

    ``extras``: what its modules keep beside their tensors, as text, where all goes into one file.
    """

    fault: str = ""
    draft: str = ""
    n_shards: int = 0
    files: dict[str, FileRecord] = {}
    extras: str = ""


Exchange = Callable[[Told], Sequence[Told]]
"""Brings what every rank tells to every rank, in their order."""


def owned(stages: Sequence[Stage], rank: int) -> dict[str, Tensor]:
    """What rank ``rank`` saves: each parameter and persistent buffer it holds that no lower rank does.

    A tied parameter comes once, under the first of its names.
    """
    seen: set[int] = set()
    names: set[str] = set()
    out: dict[str, Tensor] = {}
    for stage in sorted(stages, key=lambda s: s.rank):
        for name, tensor in named_tensors(stage).items():
            if id(tensor) not in seen and name not in names:
                seen.add(id(tensor))
                names.add(name)
                if stage.rank == rank:
                    out[name] = tensor
    return out


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded, detached, contiguous and on the CPU.

    Of a DTensor every rank of its mesh must ask.
    """
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return tensor.resolve_conj().resolve_neg().cpu().contiguous()


@dataclasses.dataclass(frozen=True)
class Cargo:
    """What one rank saves.

    ``weights`` under the model's names; ``state`` a tree of plain values and tensors, or None; where all goes
    into one file, what modules keep beside their tensors by its name;
    ``texts`` the files that rank 0 adds. ``writes`` is False on further data-parallel replicas, which only
    help to assemble sharded tensors. ``aliases`` are further names of tied weights, with the one they are
    saved under (noted in the files, as the safetensors library does). ``model``, ``steps`` and ``seed`` are
    for the manifest; ``fault`` says why this rank cannot save.
    """

    weights: Mapping[str, Tensor]
    state: Any
    texts: Mapping[str, str]
    writes: bool
    model: str
    steps: int
    seed: int
    max_bytes: int
    fault: str = ""
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _File:
    """A file of tensors to come; ``text`` is the JSON beside it, ``note`` what its header says besides."""

    tensors: dict[str, Tensor]
    text: str | None = None
    note: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _files(cargo: Cargo) -> tuple[list[_File], list[_File]]:
    """The files of weights a rank writes, and the one of its training state if there is any."""
    shards = [
        _File(shard, note={alias: name for alias, name in cargo.aliases.items() if name in shard})
        for shard in _shards(cargo.weights, cargo.max_bytes)
    ]
    if cargo.state is None:
        return shards, []
    return shards, [cargo.state if isinstance(cargo.state, _File) else _packed(cargo.state)]


def _packed(state: Any) -> _File:
    """A tree of state as text, and the tensors in it. Raises :class:`Unfit` for what cannot be kept."""
    aside: dict[str, Tensor] = {}

    def put(tensor: Tensor, where: str) -> str:
        name = where if where not in aside else f"{where}#{len(aside)}"
        aside[name] = tensor
        return name

    text = dumps(state, put)
    return _File(aside, text)


def _shards(tensors: Mapping[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        n_bytes = Spec.of(tensor).n_bytes
        if shards[-1] and size + n_bytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += n_bytes
    return [dict(sorted(s.items(), key=lambda pair: -pair[1].dtype.itemsize)) for s in shards if s]


def staged(cargo: Cargo) -> Cargo:
    """The same with every tensor copied, so that training may go on while it is written."""
    state, fault = None, cargo.fault
    try:
        if cargo.state is not None and not fault:
            state = _packed(cargo.state)
    except Unfit as error:
        fault = str(error)  # told to the others while it is saved
    sources = [*cargo.weights.values(), *(state.tensors.values() if state else ())]
    copies = iter(in_threads(map(_copying, sources), threads_for(sum(t.nbytes for t in sources))))
    weights = {name: next(copies) for name in cargo.weights}
    if state is not None:
        state = _File({name: next(copies) for name in state.tensors}, state.text)
    return dataclasses.replace(cargo, weights=weights, state=state, fault=fault)


def _copying(tensor: Tensor) -> Callable[[], Tensor]:
    """Makes a copy on the CPU: in whichever thread for what is there, else at once."""
    if is_plain(tensor):
        return lambda: whole(tensor.detach().clone(memory_format=torch.contiguous_format))
    made = whole(tensor)
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    is_same = made.layout is local.layout and _begin(made) == _begin(local)  # of a replicated one
    return lambda: made.clone() if is_same else made


def _begin(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def save(
    path: pathlib.Path,
    cargo: Cargo,
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
    if not cargo.writes:
        shards, state = _files(cargo)
        _assemble([*shards, *state])
        return
    draft: Draft | None = None
    shards, state, mine = list[_File](), list[_File](), Told()
    try:
        if cargo.fault:
            raise StoreError(cargo.fault)
        shards, state = _files(cargo)
        if rank == 0:
            draft = Draft(path)
        mine = Told(draft=str(draft.path) if draft else "", n_shards=len(shards))
    except Exception as error:  # whatever it is, the others wait to be told
        mine = Told(fault=_fault(error))
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
        done = Told()
        if draft is not None:
            try:
                _finish(draft, everyone, cargo)
            except Exception as error:
                done = Told(fault=_fault(error))
        _agree(exchange(done), path)
    except BaseException:
        if draft is not None:
            draft.drop()
        raise
    if rank == 0 and n_kept is not None:
        forget_oldest(path.parent, n_kept, cargo.steps)


def _fault(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
    return (
        str(error) if isinstance(error, (AutopipeError, ValueError)) else f"{type(error).__name__}: {error}"
    )


def _agree(everyone: Sequence[Told], path: pathlib.Path) -> Sequence[Told]:
    faults = [
        f"rank {r}: {t.fault}" if len(everyone) > 1 else t.fault for r, t in enumerate(everyone) if t.fault
    ]
    if faults:
        raise StoreError(f"{path} was not saved, and what was there is as it was: {'; '.join(faults)}")
    return everyone


def _assemble(files: Iterable[_File]) -> None:
    """Do a replica's part for the tensors of ``files`` that are sharded."""
    for file in files:
        for tensor in file.tensors.values():
            if hasattr(tensor, "full_tensor"):
                whole(tensor)


def _write(folder: pathlib.Path, named: Mapping[str, _File], *, is_aside: bool = False) -> Told:
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
        return Told(fault=_fault(error))
    return Told(files=records)


def _write_text(path: pathlib.Path, text: str) -> FileRecord:
    data = text.encode()
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(len(data), zlib.crc32(data))


def _finish(draft: Draft, everyone: Sequence[Told], cargo: Cargo) -> None:
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
    for name, text in {INDEX: json.dumps(index, indent=1), **cargo.texts}.items():
        files[name] = _write_text(draft.path / name, text)
    states = [name for name in files if name.startswith("state-") and name.endswith(".json")]
    manifest = Manifest(
        FORMAT, VERSION, cargo.model, digest(specs), cargo.steps, cargo.seed, weights, states, files
    )
    with (draft.path / MANIFEST).open("xb") as file:
        file.write(manifest.to_bytes())
        file.flush()
        os.fsync(file.fileno())
    draft.commit()


# -- one file ---------------------------------------------------------------------------------------------


def save_single(
    path: pathlib.Path,
    cargo: Cargo,
    rank: int,
    exchange: Exchange,
    names: Callable[[str], Sequence[str]],
) -> None:
    """Write one file that ``torch.load`` reads as the model's ``state_dict``, ties sharing their storage.

    Every rank writes its weights beside it first; the first one joins them without holding them.
    """
    if not cargo.writes:
        _assemble([_File(dict(cargo.weights))])
        return
    parts: pathlib.Path | None = None
    mine = Told()
    try:
        if cargo.fault:
            raise StoreError(cargo.fault)
        tensors = {n: v for n, v in cargo.state.items() if isinstance(v, Tensor)}
        rest = dumps(
            {n: v for n, v in cargo.state.items() if n not in tensors}, lambda t, _: text_of(whole(t))
        )
        if path.is_symlink() or path.is_dir():
            raise StoreError(f"{path} is a {'link' if path.is_symlink() else 'folder'}; give a new file")
        if rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = Draft(path.parent / f".{path.name}")
            parts = draft.path
            mine = Told(draft=str(parts))
    except Exception as error:
        mine = Told(fault=_fault(error))
    try:
        folder = pathlib.Path(_agree(exchange(mine), path)[0].draft)
        told = _write(folder, {f"{rank:05d}": _File({**cargo.weights, **tensors})})
        everyone = _agree(exchange(msgspec.structs.replace(told, extras=rest)), path)
        done = Told()
        if rank == 0:
            try:
                _join(folder, everyone, path, names)
            except Exception as error:
                done = Told(fault=_fault(error))
        _agree(exchange(done), path)
    finally:
        if parts is not None:
            draft.drop()


def _join(
    folder: pathlib.Path, everyone: Sequence[Told], path: pathlib.Path, names: Callable[[str], Sequence[str]]
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
