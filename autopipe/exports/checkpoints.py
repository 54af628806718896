"""A checkpoint rewritten in the layout of ``torch.distributed.checkpoint``, for training without autopipe.

Reading and checking it is left to ``runtime.keep``, which reads that layout too: ``rt.load`` is the way back.
"""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from ..errors import InputError, StoreError
from ..runtime.keep.folder import MANIFEST, Draft
from ..runtime.keep.loading import Checkpoint, open_checkpoint
from ..runtime.keep.stored import Stored
from ..runtime.keep.training import LISTED, filled, find_stored

__all__ = ["to_dcp"]


def to_dcp(
    source: str | pathlib.Path, target: str | pathlib.Path, *, flat_optimizers: bool = False
) -> pathlib.Path:
    """Rewrite the checkpoint ``source`` so that plain ``torch.distributed.checkpoint.load`` reads ``target``.

    What is in it goes by the keys it was saved with, the weights by ``model``, each under all its names.
    After ``rt.save(folder, optimizer=optimizer, scheduler=scheduler)`` and this, ::

        state = {"model": get_model_state_dict(m), "optimizer": get_optimizer_state_dict(m, o)}
        dcp.load({**state, "scheduler": s.state_dict()}, checkpoint_id=target)

    fills any model of the same weights, plain or sharded over any mesh. ``flat_optimizers`` writes optimizers
    as ``flatten_optimizer_state_dict=True`` names them. Of objects that differ from rank to rank the first
    one's come; steps, seed and random generators stay behind.

    One process does it, a tensor at a time; ``target`` appears whole, by one rename. Returns ``target``.
    Raises :class:`StoreError` for a checkpoint that is damaged, or a target that cannot be written, and
    :class:`InputError` for a target that holds something else.
    """
    source, target = pathlib.Path(source), pathlib.Path(target)
    checkpoint = open_checkpoint(source)
    faults = checkpoint.faults(checkpoint.weights, list(find_stored(checkpoint.states)))
    if faults:
        raise StoreError(f"{source} is damaged: {'; '.join(faults[:6])}; use another checkpoint")
    later: dict[int, tuple[Tensor, Stored]] = {}
    kept = {**_objects(checkpoint), **_optimizers(checkpoint, flat_optimizers)}
    if "model" in kept:
        raise InputError(
            f"{source} has other state under 'model', the key of the weights; save it by another"
        )
    tree = {"model": _model(checkpoint), **kept}
    if (target / MANIFEST).exists():
        raise InputError(f"{target} is a checkpoint itself; give a new folder")
    draft: Draft | None = None
    try:
        draft = Draft(target)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one process does it
            save(_emptied(tree, later), checkpoint_id=draft.path, planner=_OneByOne(later), no_dist=True)
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
