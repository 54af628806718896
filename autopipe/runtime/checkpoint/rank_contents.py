"""What one rank saves: its weights and state, as files to be written, copied if that is done later.

Writing the files is left to ``saving``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...stages import Stage
from ..files.manifest import FileRecord
from ..files.safetensors_file import Spec, is_plain
from ..files.threads import in_threads, threads_for
from ..wire.plain_values import Unfit, dumps
from .extra_state import named_tensors

__all__ = ["File", "RankContents", "SaveStatus", "files_of", "owned", "staged", "whole"]


class SaveStatus(msgspec.Struct, frozen=True):
    """What a rank tells the others while they save: a fault, or how far it is.

    ``extras``: what its modules keep beside their tensors, as text, where all goes into one file.
    """

    fault: str = ""
    draft: str = ""
    n_shards: int = 0
    files: dict[str, FileRecord] = {}
    extras: str = ""


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
class RankContents:
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
class File:
    """A file of tensors to come; ``text`` is the JSON beside it, ``note`` what its header says besides."""

    tensors: dict[str, Tensor]
    text: str | None = None
    note: Mapping[str, str] = dataclasses.field(default_factory=dict)


def files_of(contents: RankContents) -> tuple[list[File], list[File]]:
    """The files of weights a rank writes, and the one of its training state if there is any."""
    shards = [
        File(shard, note={alias: name for alias, name in contents.aliases.items() if name in shard})
        for shard in _shards(contents.weights, contents.max_bytes)
    ]
    if contents.state is None:
        return shards, []
    return shards, [contents.state if isinstance(contents.state, File) else _packed(contents.state)]


def _packed(state: Any) -> File:
    """A tree of state as text, and the tensors in it. Raises :class:`Unfit` for what cannot be kept."""
    aside: dict[str, Tensor] = {}

    def put(tensor: Tensor, where: str) -> str:
        name = where if where not in aside else f"{where}#{len(aside)}"
        aside[name] = tensor
        return name

    text = dumps(state, put)
    return File(aside, text)


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


def staged(contents: RankContents) -> RankContents:
    """The same with every tensor copied, so that training may go on while it is written.

    What cannot be copied is its fault, told to the others while it is saved.
    """
    state, fault = None, contents.fault
    try:
        if contents.state is not None and not fault:
            state = _packed(contents.state)
    except Unfit as error:
        fault = str(error)
    sources = [*contents.weights.values(), *(state.tensors.values() if state else ())]
    try:
        n_bytes = sum(Spec.of(tensor).n_bytes for tensor in sources)
        copies = iter(in_threads(map(_copying, sources), threads_for(n_bytes)))
    except RuntimeError as error:
        return dataclasses.replace(contents, weights={}, state=None, fault=f"{type(error).__name__}: {error}")
    weights = {name: next(copies) for name in contents.weights}
    if state is not None:
        state = File({name: next(copies) for name in state.tensors}, state.text)
    return dataclasses.replace(contents, weights=weights, state=state, fault=fault)


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
