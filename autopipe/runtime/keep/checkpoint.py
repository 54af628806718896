"""Saves and loads a pipeline's weights under the model's own names, whatever the cut, schedule or ranks.

A directory gets one or more shards per rank and an index, as Hugging Face lays them out; a single file is
what ``torch.save(model.state_dict())`` writes. Optimizer state goes beside the shards, keyed by parameter
name. Which rank holds what is left to ``runtime``.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError, StoreError
from ...stages import Stage

__all__ = ["full", "load_optimizer", "load_weights", "owned", "save_optimizer", "save_shards", "save_single"]

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLES = ("model.safetensors", "pytorch_model.bin")
"""What Hugging Face calls the one file of a checkpoint that needs no index."""


def owned(stages: Sequence[Stage], rank: int) -> dict[str, Tensor]:
    """What rank ``rank`` saves: each parameter and persistent buffer it holds that no lower rank does.

    A tied parameter comes once, under the first of its names.
    """
    seen: set[int] = set()
    names: set[str] = set()
    out: dict[str, Tensor] = {}
    for stage in sorted(stages, key=lambda s: s.rank):
        for name, tensor in stage.state_dict(keep_vars=True).items():
            if id(tensor) not in seen and name not in names:
                seen.add(id(tensor))
                names.add(name)
                if stage.rank == rank:
                    out[name] = tensor
    return out


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded, detached and on the CPU."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu().contiguous()


def _shards(tensors: Mapping[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return [s for s in shards if s]


def save_shards(
    path: pathlib.Path,
    tensors: Mapping[str, Tensor],
    *,
    rank: int,
    writes: bool,
    max_bytes: int,
    gather: Callable[[Any], list[Any]],
) -> None:
    """Write this rank's shards into the directory ``path``; rank 0 writes the index.

    ``gather`` brings every rank's object to every rank; ``writes`` is False on further data-parallel
    replicas, which only help to assemble sharded tensors.
    """
    held = {name: full(t) for name, t in tensors.items()}
    safe = importlib.util.find_spec("safetensors") is not None
    shards = _shards(held, max_bytes)
    counts = gather(len(shards))
    before, total = sum(counts[:rank]), sum(counts)
    stem, ending = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    files = [f"{stem}-{before + i + 1:05d}-of-{total:05d}.{ending}" for i in range(len(shards))]
    if writes:
        path.mkdir(parents=True, exist_ok=True)
        for file, shard in zip(files, shards, strict=True):
            _write(path / file, shard, safe)
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    n_bytes = sum(t.nbytes for t in held.values())
    everyone = gather((weight_map, n_bytes))
    if rank == 0 and writes:
        index = {
            "metadata": {"total_size": sum(n for _, n in everyone)},
            "weight_map": {name: file for m, _ in everyone for name, file in m.items()},
        }
        (path / INDEXES[0 if safe else 1]).write_text(json.dumps(index, indent=1))
    gather(None)  # nobody reads before the index is there


def _write(file: pathlib.Path, tensors: dict[str, Tensor], safe: bool) -> None:
    if safe:
        from safetensors.torch import save_file

        save_file(tensors, str(file), metadata={"format": "pt"})
    else:
        torch.save(tensors, file)


def save_single(
    path: pathlib.Path,
    tensors: Mapping[str, Tensor],
    *,
    rank: int,
    writes: bool,
    gather: Callable[[Any], list[Any]],
    names: Callable[[str], Sequence[str]],
) -> None:
    """Write one ``state_dict`` file on rank 0, with every name of a tied parameter, sharing its storage."""
    parts = gather({name: full(t) for name, t in tensors.items()})
    if rank == 0 and writes:
        merged = {alias: t for part in parts for name, t in part.items() for alias in names(name)}
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(merged, path)
    gather(None)


def load_weights(
    path: pathlib.Path, wanted: Mapping[str, Tensor], names: Callable[[str], Sequence[str]]
) -> None:
    """Copy saved weights into ``wanted``; a tied one may be stored under any of its names.

    Reads only the files that hold them. Raises :class:`StoreError` when some are missing or have another
    shape.
    """
    reader = _Reader(path)
    missing, wrong = [], []
    with torch.no_grad():
        for name, tensor in wanted.items():
            stored = next((reader[alias] for alias in (name, *names(name)) if alias in reader), None)
            if stored is None:
                missing.append(name)
            elif stored.shape != tensor.shape:
                wrong.append(f"{name} is {list(stored.shape)} there and {list(tensor.shape)} here")
            else:
                _copy(tensor, stored)
    if missing or wrong:
        faults = wrong + ([f"missing: {', '.join(missing)}"] if missing else [])
        raise StoreError(f"{path} does not fit this model: {'; '.join(faults)}; load what this model saved")


def _copy(tensor: Tensor, stored: Tensor) -> None:
    if hasattr(tensor, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        stored = distribute_tensor(stored.to(tensor.device), tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    tensor.copy_(stored)


class _Reader:
    """Tensors by name out of a checkpoint, each file opened when first needed."""

    def __init__(self, path: pathlib.Path) -> None:
        self._files: dict[pathlib.Path, Any] = {}
        index = next((path / name for name in INDEXES if (path / name).exists()), None)
        if index is not None:
            weight_map = json.loads(index.read_text())["weight_map"]
            self._where = {name: path / file for name, file in weight_map.items()}
            return
        file = next((path / name for name in SINGLES if (path / name).exists()), path)
        if file.is_file():
            self._where = dict.fromkeys(self._open(file).keys(), file)
        else:
            raise StoreError(
                f"{path} holds no checkpoint: no file, and neither {INDEXES[0]} nor {SINGLES[0]} in it"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __getitem__(self, name: str) -> Tensor:
        file = self._open(self._where[name])
        return file.get_tensor(name) if hasattr(file, "get_tensor") else file[name]

    def _open(self, file: pathlib.Path) -> Any:
        if file not in self._files:
            if file.suffix == ".safetensors":
                from safetensors import safe_open

                self._files[file] = safe_open(str(file), "pt")
            else:
                self._files[file] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        return self._files[file]


def save_optimizer(
    path: pathlib.Path, optimizer: torch.optim.Optimizer, named: Iterator[tuple[str, Tensor]], rank: int
) -> None:
    """Write this rank's optimizer state, keyed by parameter name.

    Raises :class:`InputError` for an optimizer of other parameters.
    """
    name_of = _names(optimizer, named)
    groups = [
        {**group, "params": [name_of[id(p)] for p in group["params"] if id(p) in name_of]}
        for group in optimizer.param_groups
    ]
    state = {name_of[id(p)]: s for p, s in optimizer.state.items() if id(p) in name_of}
    path.mkdir(parents=True, exist_ok=True)
    torch.save({"state": state, "param_groups": groups}, path / f"optimizer-{rank:05d}.pt")


def _names(optimizer: torch.optim.Optimizer, named: Iterator[tuple[str, Tensor]]) -> dict[int, str]:
    """The name of each parameter by its id; an empty one, which a rank without any has, has none."""
    name_of = {id(p): name for name, p in named}
    own = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [tuple(p.shape) for p in own if id(p) not in name_of and p.numel()]
    if foreign:
        raise InputError(
            f"the optimizer has parameters that are not this rank's, of shapes {foreign[:3]}; make it of "
            "runtime.parameters() or named_parameters()"
        )
    return name_of


def load_optimizer(
    path: pathlib.Path, optimizer: torch.optim.Optimizer, named: Iterator[tuple[str, Tensor]]
) -> None:
    """Restore the optimizer state of this rank's parameters, whichever ranks saved it.

    Hyperparameters come from the saved group of each group's first parameter. Raises :class:`StoreError`
    when there is no state for a parameter's name, :class:`InputError` for an optimizer of other parameters.
    """
    saved: dict[str, Any] = {}
    group_of: dict[str, dict[str, Any]] = {}
    for file in sorted(path.glob("optimizer-*.pt")):
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        saved.update(content["state"])
        group_of |= {name: group for group in content["param_groups"] for name in group["params"]}
    name_of = _names(optimizer, named)
    names = [[name_of.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
    flat = [name for group in names for name in group]
    missing = [name for name in flat if name and name not in group_of]
    if missing:
        raise StoreError(f"{path} holds no optimizer state for {', '.join(missing)}")
    numbers = iter(range(len(flat)))
    optimizer.load_state_dict(
        {
            "state": {i: saved[name] for i, name in enumerate(flat) if name in saved},
            "param_groups": [
                {**group_of.get(group[0], own), "params": [next(numbers) for _ in group]}
                for group, own in zip(names, optimizer.param_groups, strict=True)
            ],
        }
    )
