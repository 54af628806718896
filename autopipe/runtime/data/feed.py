"""One rank has the batch: it gives every other rank the inputs its stages use, and the last the target.

Splitting a batch into microbatches is left to ``microbatch``, which every rank does alike.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from ... import accelerator
from ...errors import InputError, StepError
from ...stages import Section, Stage
from ..wire.announcement import Announced, Announcement, Form, oddity
from ..wire.boundary import flatten
from ..wire.peers import Peers
from .microbatch import Batch
from .weights import Weights

__all__ = ["Feed", "Given"]

Ways = tuple[tuple[int, ...], tuple[int, ...], bool]
"""A batch's ``forms``, ``of_all`` and ``is_new``."""
Given = tuple[dict[str, Any], Any, int, Weights, Ways]
"""(inputs by name, target, asked number of microbatches, weight of each and what they counted, the forms that
are asked for): a tensor that is of no use to this rank is on the meta device."""


class Header(msgspec.Struct, frozen=True):
    """What the source says of a batch ahead of its tensors; ``owners`` has None for the target's.

    One that ``is_new`` asks for forms that are still to be recorded: every rank gets all of it.
    """

    names: list[str]
    told: Announced
    owners: list[str | None]
    n_microbatches: int
    weights: tuple[list[float], float | None]
    forms: tuple[int, ...]
    is_new: bool = False
    of_all: tuple[int, ...] = ()
    fault: str = ""


class Feed:
    """The way of batches from pipeline rank ``source`` to all others."""

    def __init__(
        self,
        source: int,
        stages: Sequence[Stage],
        peers: Peers,
        device: torch.device,
        everywhere: Collection[str] = (),
    ) -> None:
        """``everywhere`` names inputs that all ranks get: what says how a batch is cut."""
        self.source, self._peers, self._device, self._everywhere = source, peers, device, everywhere
        self._last = stages[-1].rank
        self._others = [rank for rank in range(peers.n_ranks) if rank != source]
        self.follow(stages)

    def follow(self, stages: Sequence[Stage | Section]) -> None:
        """From now on give these stages what they use."""
        self._uses: list[set[str]] = [{*self._everywhere} for _ in range(self._peers.n_ranks)]
        for stage in stages:
            self._uses[stage.rank].update(stage.inputs)

    def give(self, batch: Batch, target: Any, n_microbatches: int, weights: Weights) -> None:
        """Send a batch from the source."""
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
        except StepError as error:
            raise InputError(
                f"rank {self.source} cannot feed this batch to the others, since its inputs or its target "
                "are made of more than tensors, numbers, texts and lists, tuples and dicts of them; give "
                "those, or make the runtime without feed, and pass every rank the batch"
            ) from error
        shares = [float(weight) for weight in weights[0]], weights[1]
        header = Header(names, told, owners, n_microbatches, shares, batch.forms, is_new, batch.of_all)
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
        return inputs, target, header.n_microbatches, header.weights, ways

    def _owners(self, names: Sequence[str], whole: Mapping[str, Any], n_tensors: int) -> list[str | None]:
        """Of each tensor the input it is; None for the target's."""
        owners: list[str | None] = [name for name in names if isinstance(whole[name], Tensor)]
        return owners + [None] * (n_tensors - len(owners))

    def _is_used(self, owner: str | None, rank: int) -> bool:
        return rank == self._last if owner is None else owner in self._uses[rank]
