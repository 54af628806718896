"""Reads checkpoints: ours, Hugging Face's, torch's, single files; all is checked before anything is changed.

Which part of which tensor a rank needs is worked out by ``torch.distributed.checkpoint``'s planner; how
tensors lie in files is left to ``safetensors_file``.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ...errors import StoreError
from ...files import read_bytes, unreadable
from ..files.dcp import MAX_METADATA_BYTES, METADATA, Distcp
from ..files.folder import MANIFEST, resolve, steps_in
from ..files.manifest import MAX_TEXT_BYTES, Manifest, digest, open_files, read_manifest
from ..files.safetensors_file import Spec, TensorFile
from ..files.stored_tensor import Source, Stored, is_extra
from ..files.threads import in_threads, threads_for
from ..files.torch_save import Pickled
from ..wire.plain_values import Unfit, loads
from .foreign import renamed, sort_out

__all__ = ["Checkpoint", "Opened", "described", "differences", "done", "fill", "open_checkpoint"]

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLES = ("model.safetensors", "pytorch_model.bin")
"""What Hugging Face calls the one file of a checkpoint that needs no index."""
TRIES = 30
"""How often to open what others replace meanwhile."""


def _is_state(state: Any) -> bool:
    """Whether a tree is built as training state is: every part a dict, optimizers by parameter name."""
    if not isinstance(state, dict) or not all(isinstance(part, dict) for part in state.values()):
        return False
    held, counts = state.get("holding", {}), state.get("counts", {})
    if not all(_are_names(names) for names in held.values()) or set(counts) - {"forwards", "backwards"}:
        return False
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in counts.values()):
        return False
    for found in state.get("optimizers", {}).values():
        groups, kept = (
            (found.get(k) for k in ("groups", "state")) if isinstance(found, dict) else (None, None)
        )
        if not isinstance(groups, list) or not isinstance(kept, dict):
            return False
        names = [g.get("params") if isinstance(g, dict) else None for g in groups]
        if not all(map(_are_names, names)):
            return False
        if not all(isinstance(each, dict) for each in kept.values()):
            return False
    return True


def _are_names(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(name, str) for name in found)


class Opened(StorageReader):
    """A reader for ``torch.distributed.checkpoint.load`` that is open already and has nothing to prepare."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget: it is opened once."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """All is set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether there may be a checkpoint."""
        return pathlib.Path(checkpoint_id).exists()


def done() -> Future[None]:
    """What a reader gives once all is read."""
    found: Future[None] = Future()
    found.set_result(None)
    return found


class Checkpoint(Opened):
    """An open checkpoint, its structure checked. Also a reader for ``torch.distributed.checkpoint.load``.

    Attributes
    ----------
    path: where it is. manifest: None for one that is not ours.
    weights: name → what is known of each. states: training state by the rank that saved it, with
        :class:`Stored` in the place of tensors. extras: what modules keep beside their tensors, by name.
    """

    def __init__(self, path: pathlib.Path, known: Collection[str] = ()) -> None:
        self.path = resolve(path)
        self.manifest: Manifest | None = None
        self.states: list[dict[str, Any]] = []
        self._at: dict[str, tuple[Source, str]] = {}
        self._others: dict[str, tuple[Source, str]] = {}
        if (self.path / MANIFEST).exists() or (self.path / MANIFEST).is_symlink():
            self._open_own()
        elif (self.path / METADATA).exists():
            self._open_distributed(known)
        else:
            self._open_foreign(known)
        self.extras = {n: v for state in reversed(self.states) for n, v in state.get("extras", {}).items()}
        for name in [name for name in self._at if is_extra(name)]:
            file, inner = self._at.pop(name)
            self.extras[name] = file.extras[inner] if isinstance(file, Pickled) else Stored(file, inner)
        self.weights = {name: file.specs[inner] for name, (file, inner) in self._at.items()}

    def _open_own(self) -> None:
        self.manifest = read_manifest(self.path)
        opened = open_files(self.path, self.manifest)
        for name in self.manifest.weights:
            for tensor in opened[name].entries:
                if tensor in self._at:
                    raise StoreError(f"{self.path} holds {tensor} twice; use another checkpoint")
                self._at[tensor] = opened[name], tensor
        for name in self.manifest.states:
            tensors = opened.get(name.replace(".json", ".safetensors"))

            def take(inner: str, tensors: TensorFile | None = tensors) -> Any:
                if tensors is None or inner not in tensors.entries:
                    raise Unfit(f"there is no tensor {inner}")
                return Stored(tensors, inner)

            try:
                state = loads(read_bytes(self.path / name, MAX_TEXT_BYTES, follows_links=False), take)
            except Unfit as error:
                raise StoreError(f"{self.path / name} is damaged: {error}; use another checkpoint") from error
            if not _is_state(state):
                raise StoreError(f"{self.path / name} is no training state; use another checkpoint")
            self.states.append(state)

    def _open_foreign(self, known: Collection[str]) -> None:
        index = next((self.path / name for name in INDEXES if (self.path / name).exists()), None)
        if index is not None:
            files = _indexed(index)
        else:
            file = next((self.path / name for name in SINGLES if (self.path / name).exists()), self.path)
            if not file.is_file():
                row = steps_in(self.path)
                raise StoreError(
                    f"{self.path} is a row of saves: resume() goes on from the last, {row[0].name}, and "
                    "load() reads one of them"
                    if row
                    else f"{self.path} holds no checkpoint: no file, and neither {MANIFEST} nor {INDEXES[0]} "
                    f"nor {SINGLES[0]} in it"
                )
            files = {file.name: None}
        folder = self.path if self.path.is_dir() else self.path.parent
        for name, listed in files.items():
            opened = TensorFile(folder / name) if name.endswith(".safetensors") else Pickled(folder / name)
            if "autopipe" in opened.note:
                raise StoreError(
                    f"{folder / name} is of a checkpoint whose manifest, {MANIFEST}, is missing: it is not "
                    "whole; copy that too, or use another"
                )
            held = set(opened.entries if isinstance(opened, TensorFile) else opened.names)
            if listed is not None and not listed <= held:
                missing = ", ".join(sorted(listed - held)[:3])
                raise StoreError(
                    f"{folder / name} lacks {missing}, which the index says are in it; fetch it again"
                )
            for tensor in held if listed is None else listed:
                self._at[tensor] = opened, tensor
        own = renamed(self._at, known)
        self._at = {own[name]: place for name, place in self._at.items()}

    def _open_distributed(self, known: Collection[str]) -> None:
        """What ``torch.distributed.checkpoint`` saved: a model under whichever key, optimizers, the rest."""
        data = read_bytes(self.path / METADATA, MAX_METADATA_BYTES, follows_links=False)
        opened = Distcp(self.path, data)
        found = sort_out(opened.tree(lambda name: Stored(opened, name)), known, self.path)
        self._at = {name: (opened, stored.name) for name, stored in found.weights.items()}
        self.states = [{"optimizers": found.optimizers, "objects": found.objects, "extras": found.extras}]
        if not _is_state(self.states[0]):
            raise StoreError(f"{self.path} holds an optimizer's state that no optimizer has; use another")

    def optimizer_states(self, key: str) -> Iterator[dict[str, Any]]:
        """What each rank saved of an optimizer; others' only one goes by any key."""
        for state in self.states:
            kept = state.get("optimizers", {})
            is_one = self.manifest is None and len(kept) == 1
            yield next(iter(kept.values())) if is_one else kept.get(key, {})

    @property
    def fingerprint(self) -> int:
        """The same for all who open this save; of others' as far as what weights they hold tells."""
        if self.manifest is not None:
            return self.manifest.checksum
        return zlib.crc32(digest(self.weights).encode())

    def counted(self, what: str, otherwise: int) -> int:
        """How many ``"forwards"`` or ``"backwards"`` were called until then: their draws go on from there."""
        return next((n for s in self.states if (n := s.get("counts", {}).get(what)) is not None), otherwise)

    def stored(self, name: str) -> Stored:
        """A weight, not read."""
        return Stored(*self._at[name])

    def aliases(self, name: str) -> tuple[str, ...]:
        """The other names of a tied weight, where its file notes them as the safetensors library does."""
        file, inner = self._at[name]
        return tuple(alias for alias, other in file.note.items() if other == inner and alias not in self._at)

    # -- checks -------------------------------------------------------------------------------------

    def faults(self, names: Iterable[str], stored: Iterable[Stored] = ()) -> list[str]:
        """In words, what is wrong with the values of these weights and stored tensors; reads them all.

        Ours are held against the checksums of the manifest. Others have none: there a NaN is a fault.
        """
        every = [(name, *self._at[name]) for name in names]
        every += [(each.name, each.file, each.name) for each in stored]
        n_bytes = sum(file.specs[inner].n_bytes for _, file, inner in every)
        jobs = (functools.partial(self._fault, *each) for each in every)
        is_ours = self.manifest is not None
        return list(itertools.chain(*in_threads(jobs, threads_for(n_bytes) if is_ours else 1)))

    def _fault(self, name: str, file: Source, inner: str) -> list[str]:
        if self.manifest is None:
            return [f"{name} has values that are no numbers (NaN)"] if file.has_nan(inner) else []
        is_whole = isinstance(file, TensorFile) and self._fits(file, inner)
        return [] if is_whole else [f"{name} in {file.path.name} is damaged"]

    def _fits(self, file: TensorFile, name: str) -> bool:
        assert self.manifest is not None
        return file.checksum(name) == self.manifest.files[file.path.name].tensors[name]

    # -- reading ------------------------------------------------------------------------------------

    def read(self, wanted: Mapping[str, Tensor], stored: Mapping[str, Stored] | None = None) -> None:
        """Fill tensors and DTensors: each with the weight, or the stored tensor, of its name."""
        self._others = {name: (s.file, s.name) for name, s in (stored or {}).items()}
        planner = DefaultLoadPlanner()
        planner.set_up_planner(dict(wanted), self.read_metadata(), True)
        self.read_data(planner.finish_plan(planner.create_local_plan()), planner)
        self._others = {}

    def _place(self, name: str) -> tuple[Source, str]:
        return self._others.get(name) or self._at[name]

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """What the planner needs to know of all tensors: each is one chunk."""
        names = [*self.weights, *self._others]
        places = {name: self._place(name) for name in names}
        return Metadata({n: described(file.specs[inner]) for n, (file, inner) in places.items()})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan asks for."""
        parts = [(item, *self._place(item.storage_index.fqn)) for item in plan.items]
        fill(planner, parts, in_several=self.manifest is not None)
        return done()


def fill(planner: LoadPlanner, parts: Sequence[tuple[ReadItem, Source, str]], *, in_several: bool) -> None:
    """Read parts of tensors, each with its file and its name there, into what ``planner`` has for them.

    ``in_several`` threads where they are large: for files that bear it, ours.
    """
    filled: list[tuple[ReadItem, Tensor]] = []

    def jobs() -> Iterator[Callable[[], None]]:
        for item, file, name in parts:
            target = planner.resolve_tensor(item)
            filled.append((item, target))
            yield functools.partial(file.read_into, name, target.detach(), list(item.storage_offsets))

    n_bytes = sum(math.prod(item.lengths) * file.specs[name].dtype.itemsize for item, file, name in parts)
    in_threads(jobs(), threads_for(n_bytes) if in_several else 1)
    for item, target in filled:
        planner.commit_tensor(item, target)


def open_checkpoint(path: pathlib.Path, known: Collection[str] = ()) -> Checkpoint:
    """Open what is at ``path``; ``known`` are the names by which a model among other things is found.

    Raises :class:`StoreError` for what is no whole checkpoint. One that a save replaces meanwhile is opened
    anew, so that what is read is all of one save.
    """
    for _ in range(TRIES):
        found = _which(path)
        try:
            opened = Checkpoint(path, known)
        except (OSError, StoreError) as error:
            if _which(path) != found:
                continue
            if isinstance(error, OSError):
                raise unreadable(path, error) from error
            raise
        if _which(path) == found:
            return opened
    raise StoreError(f"{path} is replaced by others faster than it can be opened; give a save that stays")


def _which(path: pathlib.Path) -> tuple[int, int, int] | None:
    """What tells one save from another that replaces it by a rename."""
    try:
        found = resolve(path).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns  # numbers of removed ones are used again


def _indexed(index: pathlib.Path) -> dict[str, set[str] | None]:
    """The files an index names, with the tensors it says they hold."""
    try:
        found = json.loads(read_bytes(index, MAX_TEXT_BYTES))["weight_map"]
        files: dict[str, set[str] | None] = {}
        for tensor, name in found.items():
            if not isinstance(name, str) or pathlib.PurePath(name).name != name or name in ("", ".."):
                raise ValueError(f"{tensor} is said to be in {name!r}, which is no name of a file beside it")
            listed = files.setdefault(name, set())
            assert listed is not None
            listed.add(tensor)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"{index} is no index of a checkpoint: {error}; fetch it again") from error
    return files


def described(spec: Spec) -> TensorStorageMetadata:
    """A whole tensor as DCP describes one, in a single chunk."""
    size = torch.Size(spec.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(spec.dtype), size, [chunk])


def differences(
    weights: Mapping[str, Spec],
    wanted: Mapping[str, Tensor],
    known: Iterable[str],
    names: Callable[[str], Sequence[str]],
    *,
    exact: bool,
    ignored: Collection[str],
) -> tuple[dict[str, str], list[str]]:
    """(wanted name → stored name, what does not fit).

    ``known`` are all weights of the model, of whatever rank; a tied one may be stored under any of its names.
    ``exact`` also refuses other floating dtypes, which would be rounded; what patterns in ``ignored`` find
    may be there though the model has it not.
    """
    found: dict[str, str] = {}
    wrong, missing = [], []
    for name, tensor in wanted.items():
        stored = next((alias for alias in (name, *names(name)) if alias in weights), None)
        if stored is None:
            missing.append(name)
            continue
        found[name] = stored
        there, here = weights[stored], Spec.of(tensor)
        is_float = there.dtype.is_floating_point and here.dtype.is_floating_point
        if there.shape != here.shape or (there.dtype != here.dtype and (exact or not is_float)):
            turned = there.shape != here.shape and there.shape == here.shape[::-1]
            hint = ", maybe its transpose" if turned else ""
            wrong.append(f"{name} is {there} there and {here} here{hint}")
    every = {alias for name in known for alias in (name, *names(name))}
    unknown = sorted(name for name in weights if name not in every)
    extra = [name for name in unknown if not any(re.search(pattern, name) for pattern in ignored)]
    faults = _some("", wrong) + _some("missing: ", missing) + _some("not of this model: ", extra)
    return found, faults


def _some(title: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    more = f" and {len(items) - 4} more" if len(items) > 4 else ""
    return [f"{title}{', '.join(items[:4])}{more}"]
