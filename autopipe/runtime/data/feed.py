"""One rank has the batch: it gives every other rank the inputs its stages use, and the last the target.

Splitting a batch into microbatches is left to ``microbatch``, which every rank does alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from ... import accelerator
from ...errors import InputError, StepError
from ...stages import Section, Stage
from ..wire.announcement import Announced, Announcement, Form, oddity
from ..wire.boundary import Frame, flatten
from ..wire.peers import Peers
from .kinds import Kinds
from .microbatch import Batch
from .weights import Weights

__all__ = ["Feed", "Given"]

Ways = tuple[tuple[int, ...], tuple[int, ...], bool]
"""A batch's ``forms``, ``of_all`` and ``is_new``."""
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""(positional, keyword arguments) of a batch."""
Given = tuple[dict[str, Any], Any, int, Weights, Ways, tuple[int, Call | None]]
"""(inputs by name, target, asked number of microbatches, weight of each and what they counted, the forms that
are asked for, the kind and, where that is new, the call): a tensor that is of no use to this rank is on the
meta device."""


class Header(msgspec.Struct, frozen=True):
    """What the source says of a batch ahead of its tensors; ``owners`` has None for the target's.

    One that ``is_new`` asks for forms that are still to be recorded: every rank gets all of it. Of a new
    ``kind`` the ``call`` is told as well, as the frame of its arguments and the inputs that fill that.
    """

    names: list[str]
    told: Announced
    owners: list[str | None]
    n_microbatches: int
    weights: tuple[list[float], float | None]
    forms: tuple[int, ...]
    is_new: bool = False
    of_all: tuple[int, ...] = ()
    kind: int = 0
    call: tuple[str, list[str]] | None = None
    fault: str = ""


class Feed:
    """The way of batches from pipeline rank ``source`` to all others."""

    def __init__(
        self,
        source: int,
        stages: Sequence[Stage],
        peers: Peers,
        device: torch.device,
        kinds: Kinds,
    ) -> None:
        """All ranks get the inputs that say how a batch of its kind is cut."""
        self.source, self._peers, self._device, self._kinds = source, peers, device, kinds
        self._told = {kind.number for kind in kinds}
        self._last = stages[-1].rank
        self._others = [rank for rank in range(peers.n_ranks) if rank != source]
        self.follow(stages)

    def follow(self, stages: Sequence[Stage | Section]) -> None:
        """From now on give these stages what they use."""
        everywhere = {name for kind in self._kinds for name in kind.splitter.read}
        self._uses: list[set[str]] = [{*everywhere} for _ in range(self._peers.n_ranks)]
        for stage in stages:
            self._uses[stage.rank].update(stage.inputs)

    def give(self, batch: Batch, target: Any, n_microbatches: int, weights: Weights, call: Call) -> None:
        """Send a batch, which came as ``call``, from the source."""
        names = list(batch.whole)
        tensors, frame = flatten([*batch.whole.values(), target])
        owners = self._owners(names, batch.whole, len(tensors))
        for owner, kind in zip(owners, map(oddity, tensors), strict=True):
            if kind:
                raise InputError(
                    f"{owner or 'the target'} is {kind}, which rank {self.source} cannot feed to the others; "
                    "make the runtime without feed, and pass every rank the batch"
                )
        is_new = batch.is_new
        is_sent = [any(is_new or self._is_used(o, r) for r in self._others) for o in owners]
        tensors = [
            accelerator.upload(t, self._device) if sent else t
            for t, sent in zip(tensors, is_sent, strict=True)
        ]
        forms = tuple(map(Form.of, tensors))
        try:
            told = Announcement(forms, frame).told()
            came = None if batch.kind in self._told else self._shape_of(call, batch)
        except StepError as error:
            raise InputError(
                f"rank {self.source} cannot feed this batch to the others, since its inputs or its target "
                "are made of more than tensors, numbers, texts and lists, tuples and dicts of them; give "
                "those, or make the runtime without feed, and pass every rank the batch"
            ) from error
        shares = [float(weight) for weight in weights[0]], weights[1]
        ways = batch.forms, is_new, batch.of_all
        header = Header(names, told, owners, n_microbatches, shares, *ways, batch.kind, came)
        self._told.add(batch.kind)
        laid = [f.to_wire(t) if sent else t for f, t, sent in zip(forms, tensors, is_sent, strict=True)]
        leaving = []
        for rank in self._others:
            self._peers.tell(header, rank)
            leaving += [
                self._peers.group.send(t, rank)
                for t, owner in zip(laid, owners, strict=True)
                if is_new or self._is_used(owner, rank)
            ]
        for work in leaving:
            self._peers.group.wait(work)
        self._peers.finish_telling()

    def refuse(self, fault: str) -> None:
        """Say that there is no batch this time, and why."""
        for rank in self._others:
            self._peers.tell(Header([], Announced([], None, ()), [], 0, ([], 0.0), (), fault=fault), rank)
        self._peers.finish_telling()

    def take(self) -> Given:
        """Receive a batch; waits for the source as long as it takes.

        Raises :class:`InputError` where the source refused its own.
        """
        peers = self._peers
        peers.position.words, peers.position.waits_for = "waiting for the batch", self.source
        header = peers.hear(self.source, Header)
        if header.fault:
            peers.position.waits_for = -1
            raise InputError(header.fault)
        told = Announcement.heard(header.told)
        tensors = []
        for form, owner in zip(told.tensors, header.owners, strict=True):
            if not (header.is_new or self._is_used(owner, peers.rank)):
                tensors.append(torch.empty(form.shape, dtype=form.dtype, device="meta"))
                continue
            laid = form.empty(self._device)
            peers.group.wait(peers.group.recv(laid, self.source))
            tensors.append(form.from_wire(laid))
        peers.position.waits_for = -1
        *values, target = tensors if told.frame is None else told.frame.fill(tensors)
        inputs = dict(zip(header.names, values, strict=True))
        ways = header.forms, header.of_all, header.is_new
        call = None if header.call is None else self._call(header.call, inputs)
        return inputs, target, header.n_microbatches, header.weights, ways, (header.kind, call)

    def _shape_of(self, call: Call, batch: Batch) -> tuple[str, list[str]]:
        """A call without its tensors, and the inputs that those are."""
        name_of = {id(value): name for name, value in batch.whole.items()}
        tensors, frame = flatten(call)
        assert frame is not None  # arguments are no tensor
        return frame.to_text(), [name_of[id(t)] for t in tensors]

    def _call(self, told: tuple[str, list[str]], inputs: Mapping[str, Any]) -> Call:
        """Of :meth:`_shape_of`."""
        text, names = told
        args, kwargs = Frame.from_text(text).fill([inputs[name] for name in names])
        return tuple(args), kwargs

    def _owners(self, names: Sequence[str], whole: Mapping[str, Any], n_tensors: int) -> list[str | None]:
        """Of each tensor the input it is; None for the target's."""
        owners: list[str | None] = [name for name in names if isinstance(whole[name], Tensor)]
        return owners + [None] * (n_tensors - len(owners))

    def _is_used(self, owner: str | None, rank: int) -> bool:
        return rank == self._last if owner is None else owner in self._uses[rank]
