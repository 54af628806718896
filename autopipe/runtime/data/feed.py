"""One rank has the batch: it gives every other rank the inputs its stages use, and the last the target.

Splitting a batch into microbatches is left to ``microbatch``, which every rank does alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from ... import accelerator
from ...errors import InputError, StepError
from ...stages import Section, Stage
from ...tracing.inputs.free_numbers import plainly_given
from ..wire.announcement import Announced, Announcement, Form, oddity
from ..wire.boundary import flatten
from ..wire.peers import Peers
from .call_kinds import Kinds
from .microbatch import Batch
from .weights import Weights

__all__ = ["Feed", "Given"]

Ways = tuple[tuple[int, ...], tuple[int, ...], bool]
"""A batch's ``forms``, ``of_all`` and ``is_new``."""
What = Literal["kind", "form"]
Met = list[tuple[What, int, Any]]
"""What the model was recorded on, with the number of a kind: where that is new its (positional, keyword
arguments), or inputs by name that one of its forms is for."""
Given = tuple[dict[str, Any], Any, int, Weights, Ways, tuple[int, Met]]
"""(inputs by name, target, asked number of microbatches, weight of each and what they counted, the forms that
are asked for, the kind and what is to be recorded ahead): a tensor that is of no use to this rank is on the
meta device."""


class Header(msgspec.Struct, frozen=True):
    """What the source says of a batch ahead of its tensors, of which a rank is ``sent`` some.

    One that ``is_new`` asks for forms that are still to be recorded: every rank gets all of it, and ahead of
    it what else was ``met`` since the last such batch, as :data:`Met` has it: a call of each kind, and inputs
    of each form that was recorded for a batch that was refused.
    """

    names: list[str]
    told: Announced
    sent: list[bool]
    n_microbatches: int
    weights: tuple[list[float], float | None]
    forms: tuple[int, ...]
    is_new: bool = False
    of_all: tuple[int, ...] = ()
    kind: int = 0
    met: list[tuple[What, int, Announced]] = []
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
        self._known = self._recorded()
        self._met: list[tuple[int, int, dict[str, Any]]] = []
        self._refused: list[tuple[int, int, dict[str, Any]]] = []
        self._others = [rank for rank in range(peers.n_ranks) if rank != source]
        self.follow(stages)

    def follow(self, stages: Sequence[Stage | Section]) -> None:
        """From now on give these stages what they use."""
        everywhere = {name for kind in self._kinds for name in kind.splitter.read}
        self._uses: list[set[str]] = [{*everywhere} for _ in range(self._peers.n_ranks)]
        for stage in stages:
            self._uses[stage.rank].update(stage.inputs)
        self._last = stages[-1].rank

    def _recorded(self) -> tuple[int, dict[bool, int]]:
        """How many kinds there are, and forms by training flag."""
        capture = self._kinds[0].capture
        return len(capture.kinds), {flag: len(forms) for flag, forms in capture.forms.items()}

    def note(self, kind: int, inputs: Mapping[str, Any]) -> None:
        """A form of a kind was recorded for these inputs; where it was at the source, the others are told."""
        if self._peers.rank == self.source:
            self._met.append((kind, len(self._kinds[0].capture.kinds), {**inputs}))

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
        n_kinds, n_forms = self._known
        n = n_forms[self._kinds[0].capture.model.training]
        is_new = batch.is_new or batch.kind >= n_kinds or max((*batch.forms, *batch.of_all), default=0) >= n
        is_sent = {rank: [is_new or self._is_used(o, rank) for o in owners] for rank in self._others}
        leave = [*map(any, zip(*is_sent.values(), strict=True))]
        tensors = [
            accelerator.upload(t, self._device) if x else t for t, x in zip(tensors, leave, strict=True)
        ]
        forms = tuple(map(Form.of, tensors))
        met = self._laid(n_kinds) if is_new else []
        try:
            told = Announcement(forms, frame).told()
            ahead = [(what, number, given.told()) for what, number, given, _ in met]
        except StepError as error:
            raise InputError(
                f"rank {self.source} cannot feed this batch to the others, since its inputs or its target "
                "are made of more than tensors, numbers, texts and lists, tuples and dicts of them; give "
                "those, or make the runtime without feed, and pass every rank the batch"
            ) from error
        shares = [float(weight) for weight in weights[0]], weights[1]
        ways = batch.forms, is_new, batch.of_all, batch.kind, ahead
        if is_new:
            self._known, self._met, self._refused = self._recorded(), [], []
        first = [t for *_, laid in met for t in laid]
        laid = [f.to_wire(t) if x else t for f, t, x in zip(forms, tensors, leave, strict=True)]
        leaving = []
        for rank, sent in is_sent.items():
            self._peers.tell(Header(names, told, sent, n_microbatches, shares, *ways), rank)
            own = (t for t, x in zip(laid, sent, strict=True) if x)
            leaving += [self._peers.group.send(t, rank) for t in (*first, *own)]
        for work in leaving:
            self._peers.group.wait(work)
        self._peers.finish_telling()

    def refuse(self, fault: str) -> None:
        """Say that there is no batch this time, and why."""
        self._refused += self._met
        self._met = []
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
        met = [(what, n, self._heard(Announcement.heard(told))) for what, n, told in header.met]
        told = Announcement.heard(header.told)
        tensors = []
        for form, is_sent in zip(told.tensors, header.sent, strict=True):
            here = (
                self._receive(form) if is_sent else torch.empty(form.shape, dtype=form.dtype, device="meta")
            )
            tensors.append(here)
        peers.position.waits_for = -1
        *values, target = tensors if told.frame is None else told.frame.fill(tensors)
        inputs = dict(zip(header.names, values, strict=True))
        ways = header.forms, header.of_all, header.is_new
        return inputs, target, header.n_microbatches, header.weights, ways, (header.kind, met)

    def _laid(self, n_kinds: int) -> list[tuple[What, int, Announcement, list[Tensor]]]:
        """What was recorded since there were ``n_kinds``, in its order, to be told and sent."""
        new = [kind for kind in self._kinds if kind.number >= n_kinds]
        met: list[tuple[float, What, int, Any]] = [
            (kind.number, "kind", kind.number, plainly_given(kind.capture.recorded_with)) for kind in new
        ]
        met += [(n - 0.5, "form", number, inputs) for number, n, inputs in self._refused]
        found: list[tuple[What, int, Announcement, list[Tensor]]] = []
        for _, what, number, given in sorted(met, key=lambda one: one[0]):
            tensors, frame = flatten([given])
            here = [accelerator.upload(t.detach(), self._device) for t in tensors]
            told = Announcement(tuple(map(Form.of, here)), frame)
            laid = [f.to_wire(t) for f, t in zip(told.tensors, here, strict=True)]
            found.append((what, number, told, laid))
        return found

    def _heard(self, told: Announcement) -> Any:
        """A call of a new kind, or inputs that a form is for."""
        assert told.frame is not None  # neither is a tensor
        return told.frame.fill([self._receive(form) for form in told.tensors])[0]

    def _receive(self, form: Form) -> Tensor:
        laid = form.empty(self._device)
        self._peers.group.wait(self._peers.group.recv(laid, self.source))
        return form.from_wire(laid)

    def _owners(self, names: Sequence[str], whole: Mapping[str, Any], n_tensors: int) -> list[str | None]:
        """Of each tensor the input it is; None for the target's."""
        owners: list[str | None] = [name for name in names if isinstance(whole[name], Tensor)]
        return owners + [None] * (n_tensors - len(owners))

    def _is_used(self, owner: str | None, rank: int) -> bool:
        return rank == self._last if owner is None else owner in self._uses[rank]
