"""Reads checkpoints: our own, Hugging Face's, and single files; all is checked before anything is changed.

Which part of which tensor a rank needs is worked out by ``torch.distributed.checkpoint``'s planner; how
tensors lie in files is left to ``tensorfile``.
"""

from __future__ import annotations

import json
import os
import pathlib
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ...errors import StoreError
from ..wire.values import Unfit, loads
from .extra import is_extra
from .folder import MANIFEST, resolve
from .manifest import Manifest, open_files, read_manifest, read_plain
from .tensorfile import Spec, TensorFile, open_regular

__all__ = ["Checkpoint", "Stored", "differences", "open_checkpoint"]

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLES = ("model.safetensors", "pytorch_model.bin")
"""What Hugging Face calls the one file of a checkpoint that needs no index."""


class Pickled:
    """The tensors of a file that ``torch.save`` wrote, behind what a :class:`TensorFile` has to read."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.note: dict[str, str] = {}
        os.close(open_regular(path, follows_links=True)[0])
        try:
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    bad = archive.testzip()
                if bad is not None:
                    raise StoreError(f"{path} is damaged: {bad} in it does not fit its checksum; use another")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of old and odd forms, which are told below or fit
                found = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
        except Exception as error:  # a damaged or hostile pickle ends in any error there is
            first = str(error).strip().splitlines()[:1]
            raise StoreError(
                f"{path} cannot be read as tensors: {type(error).__name__}: {''.join(first)}; nothing but "
                "tensors, numbers and texts is ever loaded"
            ) from error
        if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
            raise StoreError(f"{path} holds no mapping of names to tensors, as a model's state_dict is")
        self.extras = {name: value for name, value in found.items() if is_extra(name)}
        self._tensors = {name: value for name, value in found.items() if name not in self.extras}
        odd = [name for name, value in self._tensors.items() if not _is_plain(value)]
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
        tensor = self._tensors[name]
        return bool((tensor.is_floating_point() or tensor.is_complex()) and torch.isnan(tensor).any())

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


def _is_plain(value: Any) -> bool:
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided and value.device.type == "cpu"
    return is_dense and not value.is_quantized and not hasattr(value, "to_local")


def _is_state(state: Any) -> bool:
    """Whether a tree is built as training state is: every part a dict, optimizers by parameter name."""
    if not isinstance(state, dict) or not all(isinstance(part, dict) for part in state.values()):
        return False
    for found in state.get("optimizers", {}).values():
        groups, kept = (
            (found.get(k) for k in ("groups", "state")) if isinstance(found, dict) else (None, None)
        )
        if not isinstance(groups, list) or not isinstance(kept, dict):
            return False
        names = [g.get("params") if isinstance(g, dict) else None for g in groups]
        if not all(isinstance(n, list) and all(isinstance(x, str) for x in n) for n in names):
            return False
        if not all(isinstance(each, dict) for each in kept.values()):
            return False
    return True


class Stored:
    """A tensor of a checkpoint that has not been read: where it is, and whether it was numpy's."""

    __slots__ = ("file", "is_array", "name")

    def __init__(self, file: TensorFile, name: str, is_array: bool = False) -> None:
        self.file, self.name, self.is_array = file, name, is_array

    def numpy(self) -> Stored:
        """The same, to be read as an array."""
        return Stored(self.file, self.name, True)

    def read(self) -> Any:
        """The tensor, or array."""
        tensor = self.file.read(self.name)
        return tensor.numpy() if self.is_array else tensor

    @property
    def spec(self) -> Spec:
        return self.file.entries[self.name].spec


class Checkpoint(StorageReader):
    """An open checkpoint, its structure checked. Also a reader for ``torch.distributed.checkpoint.load``.

    Attributes
    ----------
    path: where it is. manifest: None for one that is not ours.
    weights: name → what is known of each. states: training state by the rank that saved it, with
        :class:`Stored` in the place of tensors. extras: what modules keep beside their tensors, by name.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = resolve(path)
        self.manifest: Manifest | None = None
        self.states: list[dict[str, Any]] = []
        self._files: dict[str, TensorFile | Pickled] = {}
        self._others: dict[str, tuple[TensorFile, str]] = {}
        if (self.path / MANIFEST).exists() or (self.path / MANIFEST).is_symlink():
            self._open_own()
        else:
            self._open_foreign()
        self.extras = {n: v for state in reversed(self.states) for n, v in state.get("extras", {}).items()}
        for name in [name for name in self._files if is_extra(name)]:
            file = self._files.pop(name)
            self.extras[name] = Stored(file, name) if isinstance(file, TensorFile) else file.extras[name]
        self.weights = {name: _spec(file, name) for name, file in self._files.items()}

    def _open_own(self) -> None:
        self.manifest = read_manifest(self.path)
        opened = open_files(self.path, self.manifest)
        for name in self.manifest.weights:
            for tensor in opened[name].entries:
                if tensor in self._files:
                    raise StoreError(f"{self.path} holds {tensor} twice; use another checkpoint")
                self._files[tensor] = opened[name]
        for name in self.manifest.states:
            tensors = opened.get(name.replace(".json", ".safetensors"))

            def take(inner: str, tensors: TensorFile | None = tensors) -> Any:
                if tensors is None or inner not in tensors.entries:
                    raise Unfit(f"there is no tensor {inner}")
                return Stored(tensors, inner)

            try:
                state = loads(read_plain(self.path / name), take)
            except Unfit as error:
                raise StoreError(f"{self.path / name} is damaged: {error}") from error
            if not _is_state(state):
                raise StoreError(f"{self.path / name} is no training state")
            self.states.append(state)

    def _open_foreign(self) -> None:
        index = next((self.path / name for name in INDEXES if (self.path / name).exists()), None)
        if index is not None:
            files = _indexed(index)
        else:
            file = next((self.path / name for name in SINGLES if (self.path / name).exists()), self.path)
            if not file.is_file():
                raise StoreError(
                    f"{self.path} holds no checkpoint: no file, and neither {MANIFEST} nor {INDEXES[0]} nor "
                    f"{SINGLES[0]} in it"
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
                raise StoreError(f"{folder / name} lacks {missing}, which the index says are in it")
            for tensor in held if listed is None else listed:
                self._files[tensor] = opened

    # -- checks -------------------------------------------------------------------------------------

    def faults(self, names: Iterable[str], stored: Iterable[Stored] = ()) -> list[str]:
        """In words, what is wrong with the values of these weights and stored tensors; reads them all.

        Ours are held against the checksums of the manifest. Others have none: there a NaN is a fault.
        """
        found = []
        for name in names:
            file = self._files[name]
            if self.manifest is None:
                if file.has_nan(name):
                    found.append(f"{name} has values that are no numbers (NaN)")
            elif isinstance(file, TensorFile) and not self._fits(file, name):
                found.append(f"{name} in {file.path.name} is damaged")
        found += [
            f"{s.name} in {s.file.path.name} is damaged" for s in stored if not self._fits(s.file, s.name)
        ]
        return found

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

    def _at(self, name: str) -> tuple[TensorFile | Pickled, str]:
        return self._others.get(name) or (self._files[name], name)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """What the planner needs to know of all tensors: each is one chunk."""
        names = [*self.weights, *self._others]
        specs = {name: _spec(*self._at(name)) for name in names}
        return Metadata({name: _described(spec) for name, spec in specs.items()})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan asks for."""
        for item in plan.items:
            file, name = self._at(item.storage_index.fqn)
            target = planner.resolve_tensor(item)
            file.read_into(name, target.detach(), list(item.storage_offsets))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget: a checkpoint is opened once."""

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


def open_checkpoint(path: pathlib.Path) -> Checkpoint:
    """Open what is at ``path``. Raises :class:`StoreError` for what is no whole checkpoint."""
    try:
        return Checkpoint(path)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error


def _indexed(index: pathlib.Path) -> dict[str, set[str] | None]:
    """The files an index names, with the tensors it says they hold."""
    try:
        found = json.loads(read_plain(index, follows_links=True))["weight_map"]
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


def _spec(file: TensorFile | Pickled, name: str) -> Spec:
    return file.entries[name].spec if isinstance(file, TensorFile) else file.specs[name]


def _described(spec: Spec) -> TensorStorageMetadata:
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
) -> tuple[dict[str, str], list[str]]:
    """(wanted name → stored name, what does not fit).

    ``known`` are all weights of the model, of whatever rank; a tied one may be stored under any of its names.
    ``exact`` also refuses other floating dtypes, which would be rounded.
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
            wrong.append(f"{name} is {there} there and {here} here")
    every = {alias for name in known for alias in (name, *names(name))}
    extra = sorted(name for name in weights if name not in every)
    faults = _some("", wrong) + _some("missing: ", missing) + _some("not of this model: ", extra)
    return found, faults


def _some(title: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    more = f" and {len(items) - 4} more" if len(items) > 4 else ""
    return [f"{title}{', '.join(items[:4])}{more}"]
