"""Buffers, weights and layers that user code changes between steps on some ranks alone.

Every rank's model has all layers, all buffers, and all weights until it trains; those of a stage's own rank
count, and of a loss those of the last stage's. What is changed elsewhere alone is lost, and where stages of
several ranks read one tensor, their copies are to be equal. Trained weights of several ranks are left to
``reduce.ties``, writes in a step to ``written_copies``.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError
from ...stages import Stage
from ...tracing.state.reach import reached
from ...tracing.state.whole_layers import WholeLayers
from .stale import StaleTensor

__all__ = ["WrittenAlone"]

LOSS = "loss_fn"
"""What a loss is called that is a module."""
Gather = Callable[[Any, Any], Sequence[Any]]
"""Brings what every rank tells, of a type, to every rank, in their order."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where a module holds a tensor, and the ranks whose stages, or whose loss, read it."""

    name: str
    held: Mapping[str, Tensor | None]
    leaf: str
    ranks: frozenset[int]
    is_of_loss: bool = False

    @property
    def tensor(self) -> Tensor | None:
        """What is there, unless it is old and so refuses to be written to."""
        found = self.held.get(self.leaf)
        return None if isinstance(found, StaleTensor) else found

    def is_other(self, was: Tensor | None, version: int) -> bool:
        """Whether what is there is not what ``was``, or not of that version."""
        now = self.held.get(self.leaf)
        return not isinstance(now, StaleTensor) and (now is not was or _version(now) != version)


class WrittenAlone:
    """Watches the tensors of a rank's model from step to step."""

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[Stage],
        rank: int,
        gather: Gather,
        layers: WholeLayers | None,
        loss_fn: object = None,
    ) -> None:
        """``layers`` are those of the model that stay whole; None where one process has them all."""
        self._rank, self._gather = rank, gather
        loss = loss_fn if isinstance(loss_fn, nn.Module) and stages else None
        beside = () if loss is None else _places_of_loss(loss, model, stages)
        self._places = (*_places(model, stages), *beside)
        self._shared = [p for p in self._places if len(p.ranks) > 1]
        held = {
            s.rank: {id(m) for stage in stages if stage.rank == s.rank for m in stage.modules()}
            for s in stages
        }
        self._layers = {
            path: [rank for rank, modules in held.items() if id(module) in modules]
            for path, module in model.named_modules(remove_duplicate=False)
        }
        self._watched_layers = {} if layers is None else {"": layers}
        if loss is not None:
            self._watched_layers[LOSS] = _whole(loss)
            self._layers[LOSS] = [stages[-1].rank]
        self._changes: dict[str, str] = {}
        self._has_changed = False
        self._before: dict[str, tuple[Tensor | None, int]] = {}
        self.note()

    def note(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Take all as it is, or ``tensors`` alone, for what every rank has written alike."""
        told = None if tensors is None else {id(tensor) for tensor in tensors}
        noted = (p for p in self._places if p.tensor is not None and (told is None or id(p.tensor) in told))
        before = {} if told is None else self._before
        self._before = before | {p.name: (p.tensor, _version(p.tensor)) for p in noted}
        watched = (p for p in self._places if self._is_told(p) and p.name in self._before)
        self._watched = [(p, *self._before[p.name]) for p in watched]

    def _is_told(self, place: _Place) -> bool:
        """Whether a write here alone would be wrong; what trains on several ranks is compared as it is."""
        tensor = place.tensor
        if self._rank not in place.ranks:
            return tensor is not None and (not place.is_of_loss or _stays(tensor))
        return len(place.ranks) > 1 and tensor is not None and _stays(tensor)

    @property
    def any(self) -> bool:
        """Whether something here was changed that others have to have changed as well."""
        self._look()
        return bool(self._changes) or any(
            place.is_other(was, version) for place, was, version in self._watched
        )

    def after_call(self) -> None:
        """What calls change in layers is nothing that others have to change: looked at once any was seen."""
        for layers in self._watched_layers.values() if self._has_changed else ():
            if layers.changed():
                layers.accept(())

    def _look(self) -> None:
        """See what has changed in layers since all ranks agreed on it, or a call ended."""
        self._changes = {}
        for of, layers in self._watched_layers.items():
            for name, path in layers.changed().items():
                self._changes[f"{of}{'' if name[0] == '.' else ' '}{name}".lstrip()] = of or path
        self._has_changed |= bool(self._changes)

    @property
    def has_shared(self) -> bool:
        """Whether stages of several ranks read the same tensor; alike on every rank."""
        return bool(self._shared)

    def check(self) -> None:
        """Raise :class:`InputError`, on every rank alike, for what was written to on some ranks alone."""
        self._look()
        written = [place.name for place, was, version in self._watched if place.is_other(was, version)]
        told = self._gather((written, self._changes), tuple[list[str], dict[str, str]])
        self._judge_layers([each for _, each in told])
        names = {name for each, _ in told for name in each}
        names |= {p.name for p in self._shared}
        looked = [p for p in self._places if p.name in names and p.tensor is not None]
        mine = {
            p.name: (_digest(p.tensor), p.is_other(*self._before.get(p.name, (None, -1))))
            for p in looked
            if p.tensor is not None and (len(p.ranks) == 1 or _stays(p.tensor))
        }
        by_rank = self._gather(mine, dict[str, tuple[int, bool]])
        for place in self._places:
            if place.name in names:
                _judge(place, by_rank)
        for layers in self._watched_layers.values() if self._changes else ():
            layers.accept(())
        self.note()

    def read_elsewhere(self) -> dict[str, Tensor]:
        """By name, buffers of the model that stages of other ranks alone read, where they are here."""
        found = {p.name: p.tensor for p in self._places if self._rank not in p.ranks}
        return {
            name: tensor
            for name, tensor in found.items()
            if tensor is not None and not isinstance(tensor, nn.Parameter) and not tensor.is_meta
        }

    def _judge_layers(self, by_rank: Sequence[Mapping[str, str]]) -> None:
        for name, path in {name: path for told in by_rank for name, path in told.items()}.items():
            tellers = [rank for rank, told in enumerate(by_rank) if name in told]
            holders = self._layers.get(path, []) if path else []
            if holders and not {*holders} & {*tellers}:
                raise InputError(
                    f"{name} changed on rank {tellers[0]}, and the stage that runs it is on rank "
                    f"{holders[0]}, where it did not; change it on every rank (not under `if rank == 0`)"
                )


def _judge(place: _Place, by_rank: Sequence[Mapping[str, tuple[int, bool]]]) -> None:
    told = {rank: known[place.name] for rank, known in enumerate(by_rank) if place.name in known}
    readers = {rank: told[rank] for rank in sorted(place.ranks) if rank in told}
    if not readers:
        return
    values = {value for value, _ in readers.values()}
    if len(values) > 1:
        ranks = " and ".join(map(str, readers))
        raise InputError(
            f"{place.name} has other values on each of ranks {ranks}, whose stages read it; write the same "
            "to it on every rank (not under `if rank == 0`, and with one seed)"
        )
    if any(is_written for _, is_written in readers.values()):
        return
    lost = [rank for rank, (value, is_written) in told.items() if is_written and value not in values]
    if lost:
        raise InputError(
            f"{place.name} was written to on rank {lost[0]}, and the stage that reads it is on rank "
            f"{next(iter(readers))}, where it was not; write to it on every rank (not under `if rank == 0`)"
        )


def _places(model: nn.Module, stages: Sequence[Stage]) -> Iterator[_Place]:
    ranks: dict[int, set[int]] = {}
    for stage in stages:
        for tensor in (*stage.parameters(), *stage.buffers()):
            ranks.setdefault(id(tensor), set()).add(stage.rank)
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # whose registries are its own
        for held in (module._parameters, module._buffers):
            for leaf, tensor in held.items():
                if tensor is not None and id(tensor) in ranks:
                    name = f"{path}.{leaf}".lstrip(".")
                    yield _Place(name, held, leaf, frozenset(ranks[id(tensor)]))


def _places_of_loss(loss: nn.Module, model: nn.Module, stages: Sequence[Stage]) -> Iterator[_Place]:
    """Those of a loss alone, which the last stage's rank makes."""
    others = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    last = frozenset({stages[-1].rank})
    for path, module in loss.named_modules():
        for held in (module._parameters, module._buffers):
            for leaf, tensor in held.items():
                if tensor is not None and id(tensor) not in others:
                    yield _Place(
                        ".".join(filter(None, (LOSS, path, leaf))), held, leaf, last, is_of_loss=True
                    )


def _whole(loss: nn.Module) -> WholeLayers:
    def is_open(path: str) -> bool:
        return False

    return WholeLayers(loss, is_open, reached(loss, is_open))


def _stays(tensor: Tensor) -> bool:
    return not (isinstance(tensor, nn.Parameter) and tensor.requires_grad)


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version


@torch.no_grad()
def _digest(tensor: Tensor) -> int:
    """A number of all its values; 0 for what has none here to look at."""
    if tensor.layout is not torch.strided or tensor.is_meta or hasattr(tensor, "to_local"):
        return 0
    values = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(values.view(torch.uint8).numpy().data) if values.numel() else 0
