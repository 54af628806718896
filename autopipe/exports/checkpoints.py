"""Checkpoints for training without autopipe: what ``torch.distributed.checkpoint`` reads, in place or anew.

Reading and checking is left to ``runtime.checkpoint``, which reads torch's layout too: ``rt.load`` is the way
back.
"""

from __future__ import annotations

import io
import pathlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..arguments import place
from ..errors import InputError, StoreError
from ..runtime.checkpoint.loading import Checkpoint, Opened, described, done, fill, open_checkpoint
from ..runtime.checkpoint.optimizer_state import LISTED
from ..runtime.checkpoint.training_state import filled, find_stored
from ..runtime.files.folder import MANIFEST, Draft
from ..runtime.files.safetensors_file import Spec
from ..runtime.files.stored_tensor import Source, Stored

__all__ = ["dcp_reader", "to_dcp"]


def dcp_reader(source: str | pathlib.Path, *, flat_optimizers: bool = False) -> StorageReader:
    """What plain ``torch.distributed.checkpoint.load`` reads the checkpoint ``source`` through, where it is.

    After ``rt.save(folder, optimizer=optimizer, scheduler=scheduler)`` ::

        state = {"model": get_model_state_dict(m), "optimizer": get_optimizer_state_dict(m, o)}
        dcp.load({**state, "scheduler": s.state_dict()}, storage_reader=dcp_reader(folder))

    fills any model of the same weights, plain or sharded over any mesh. What is in it goes by the keys it was
    saved with, the weights by ``model``, each under all its names. ``flat_optimizers`` names optimizers'
    state as ``flatten_optimizer_state_dict=True`` does. Of objects that differ from rank to rank the first
    one's come; steps, seed and random generators stay behind.

    Every process makes one, and holds what it reads against the checksums first. Raises :class:`StoreError`
    for a checkpoint that is damaged, :class:`InputError` for one with other state under ``model``.
    """
    return _Reader(open_checkpoint(place("source", source)), flat_optimizers)


def to_dcp(
    source: str | pathlib.Path, target: str | pathlib.Path, *, flat_optimizers: bool = False
) -> pathlib.Path:
    """Rewrite the checkpoint ``source`` in the layout of ``torch.distributed.checkpoint``, for other tools.

    ``dcp.load(state, checkpoint_id=target)`` then reads what ``dcp.load(state, storage_reader=
    dcp_reader(source))`` does, by the same keys, without autopipe: see :func:`dcp_reader`.

    One process does it, a tensor at a time; ``target`` appears whole, by one rename. Returns ``target``.
    Raises :class:`StoreError` for a checkpoint that is damaged, or a target that cannot be written, and
    :class:`InputError` for a target that holds something else.
    """
    source, target = place("source", source), place("target", target)
    checkpoint = open_checkpoint(source)
    _check(checkpoint, checkpoint.weights, list(find_stored(checkpoint.states)))
    later: dict[int, tuple[Tensor, Stored]] = {}
    tree = _emptied(_tree(checkpoint, flat_optimizers), later)
    if (target / MANIFEST).exists():
        raise InputError(f"{target} is a checkpoint itself; give a new folder")
    draft: Draft | None = None
    try:
        draft = Draft(target)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one process does it
            save(tree, checkpoint_id=draft.path, planner=_OneByOne(later), no_dist=True)
        draft.commit()
    except (OSError, RuntimeError, CheckpointException) as error:
        causes = (
            [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
        )
        raise StoreError(f"{target} was not written: {(causes or [error])[0]}") from error
    finally:
        if draft is not None:
            draft.drop()
    return target


def _check(checkpoint: Checkpoint, names: Iterable[str], stored: Iterable[Stored]) -> None:
    faults = checkpoint.faults(names, stored)
    if faults:
        raise StoreError(f"{checkpoint.path} is damaged: {'; '.join(faults[:6])}; use another checkpoint")


class _Reader(Opened):
    """A checkpoint of ours as one of DCP's: tensors and values by the flat names that its planner gives."""

    def __init__(self, checkpoint: Checkpoint, flat_optimizers: bool) -> None:
        self._checkpoint, planner = checkpoint, DefaultSavePlanner()
        later: dict[int, tuple[Tensor, Stored]] = {}
        try:
            planner.set_up_planner(_emptied(_tree(checkpoint, flat_optimizers), later))
        except ValueError as error:
            raise StoreError(
                f"{checkpoint.path} has two things of one name: {error}; save one of them by another"
            ) from error
        found, self._paths = planner.state_dict, planner.mappings
        self._stored = {name: later[id(v)][1] for name, v in found.items() if id(v) in later}
        self._values = {name: v for name, v in found.items() if name not in self._stored}

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """What is in it, by flat name."""
        entries: dict[str, Any] = {name: described(stored.spec) for name, stored in self._stored.items()}
        for name, value in self._values.items():
            is_tensor = isinstance(value, Tensor)
            entries[name] = described(Spec.of(value)) if is_tensor else BytesStorageMetadata()
        return Metadata(entries, self._paths)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan asks for, its values checked before any is."""
        asked = [item.storage_index.fqn for item in plan.items]
        _check(self._checkpoint, (), [self._stored[name] for name in asked if name in self._stored])
        parts: list[tuple[ReadItem, Source, str]] = []
        for item, name in zip(plan.items, asked, strict=True):
            if name in self._stored:
                parts.append((item, self._stored[name].file, self._stored[name].name))
            else:
                _give(planner, item, self._values[name])
        fill(planner, parts, in_several=self._checkpoint.manifest is not None)
        return done()


def _give(planner: LoadPlanner, item: ReadItem, value: Any) -> None:
    """Fill what a plan asks for of a value that is in memory."""
    if item.type is LoadItemType.BYTE_IO:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        planner.load_bytes(item, buffer)
        return
    for dim, (first, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        value = value.narrow(dim, first, size)
    target = planner.resolve_tensor(item)
    target.detach().copy_(value)
    planner.commit_tensor(item, target)


class _OneByOne(DefaultSavePlanner):
    """Plans with tensors that have no values, and reads each when it is written."""

    def __init__(self, later: Mapping[int, tuple[Tensor, Stored]]) -> None:
        super().__init__()
        self._later = later

    def resolve_data(self, write_item: WriteItem) -> Any:
        """What is written: the values of a tensor, or the bytes of an object."""
        found = self.lookup_object(write_item.index)
        return (
            self._later[id(found)][1].read() if id(found) in self._later else super().resolve_data(write_item)
        )


def _emptied(tree: Any, later: dict[int, tuple[Tensor, Stored]]) -> Any:
    """The tree with a tensor without values for each stored one; ``later`` says which is which."""
    if isinstance(tree, Stored):
        empty = torch.empty(tree.spec.shape, dtype=tree.spec.dtype, device="meta")
        later[id(empty)] = empty, tree
        return empty
    if isinstance(tree, dict):
        return {key: _emptied(value, later) for key, value in tree.items()}
    return tree


def _tree(checkpoint: Checkpoint, is_flat: bool) -> dict[str, Any]:
    """All that DCP keeps of a checkpoint, by its key, with :class:`Stored` in the place of most tensors."""
    kept = {**_objects(checkpoint), **_optimizers(checkpoint, is_flat)}
    if "model" in kept:
        raise InputError(
            f"{checkpoint.path} has other state under 'model', the key of the weights; save it by another"
        )
    return {"model": _model(checkpoint), **kept}


def _model(checkpoint: Checkpoint) -> dict[str, Any]:
    """The weights, each under all its names, and what modules keep beside them."""
    names = {name: (name, *checkpoint.aliases(name)) for name in checkpoint.weights}
    weights = {alias: checkpoint.stored(name) for name, every in names.items() for alias in every}
    return {**weights, **filled(checkpoint.extras)}


def _objects(checkpoint: Checkpoint) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for state in checkpoint.states:
        found = {**state.get("objects", {}), **found}
    return {key: filled(value) for key, value in found.items()}


def _optimizers(checkpoint: Checkpoint, is_flat: bool) -> dict[str, Any]:
    keys = dict.fromkeys(key for state in checkpoint.states for key in state.get("optimizers", {}))
    return {key: (_flat if is_flat else _nested)(checkpoint, key) for key in keys}


def _nested(checkpoint: Checkpoint, key: str) -> dict[str, Any]:
    """An optimizer as ``get_optimizer_state_dict`` has it: groups of ranks that are alike become one."""
    state: dict[str, Any] = {}
    groups: dict[tuple[int, str], dict[str, Any]] = {}
    for found in checkpoint.optimizer_states(key):
        state = {**found.get("state", {}), **state}
        for i, (names, options) in enumerate(_groups(found)):
            merged = groups.setdefault((i, repr(options)), {**options, "params": []})
            merged["params"] += [name for name in names if name not in merged["params"]]
    ordered = [groups[at] for at in sorted(groups, key=lambda at: at[0])]
    return {"state": state, "param_groups": [g for g in ordered if g["params"]] or ordered[:1]}


def _flat(checkpoint: Checkpoint, key: str) -> dict[str, Any]:
    """As ``get_optimizer_state_dict`` has it with ``flatten_optimizer_state_dict=True``."""
    made: dict[str, Any] = {}
    for found in checkpoint.optimizer_states(key):
        for name, each in found.get("state", {}).items():
            made |= {f"state.{name}.{kind}": value for kind, value in each.items()}
        for names, options in _groups(found):
            made |= {f"param_groups.{name}.{k}": v for name in names for k, v in options.items()}
    return made


def _groups(found: Mapping[str, Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """(names of parameters, options) of each group."""
    for group in found.get("groups", ()):
        yield group["params"], filled({k: v for k, v in group.items() if k not in LISTED})
