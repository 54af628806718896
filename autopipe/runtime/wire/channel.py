"""Moves messages between ranks over ``torch.distributed``, in exactly the order it is told.

That order is left to ``schedule``, what to do when a rank fails to ``failure``.

Shapes are announced ahead of each message until an edge is settled: then only ahead of the first for input
shapes that are new, as both sides remember it. An edge whose shapes differ for equal input shapes (they
depend on data) never settles. Tensors are sent bare, small ones of a message packed together.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import accelerator
from ...errors import StepError
from ...host_link import SENT
from .announcement import LIKE, Announced, Announcement, Form, oddity, plain
from .boundary import Book, Edge
from .peers import Peers

__all__ = ["Channel", "Gradients", "Values"]

LAG = 2
"""Messages to one peer under way before the oldest is waited for: by the host, on an accelerator by its
stream, which may then use that message's memory again."""
AHEAD_BYTES = 1 << 20
"""The largest message that is received ahead: what it takes more of memory for that is no part of a plan."""


class Channel:
    """One rank's end of all its connections; what goes over it goes by :class:`Values` or :class:`Gradients`.

    ``signatures`` (set per step) are what shapes depend on, one per microbatch. ``groups`` carry
    tensors: those of the pipeline's device, and those in the host's memory. ``is_of_hosts``: these are one.
    """

    def __init__(self, peers: Peers, device: torch.device) -> None:
        self.peers, self.device, self.is_of_hosts = peers, device, not accelerator.is_async(device)
        self.groups = peers.group, peers.control if accelerator.is_async(device) else peers.group
        self._leaving: list[collections.deque[list[tuple[Any, Tensor]]]] = [
            collections.deque() for _ in range(peers.n_ranks)
        ]
        self.signatures: Sequence[int] = ()

    def send(self, tensors: Sequence[Tensor], peer: int) -> None:
        """Start sending the tensors of one message."""
        message = []
        for tensor in tensors:
            work = self.groups[tensor.is_cpu].send(tensor, peer)
            if work is not SENT:
                message.append((work, tensor))
        if message:
            leaving = self._leaving[peer]
            leaving.append(message)
            while len(leaving) > LAG:
                self._finish(leaving.popleft())

    def flush(self) -> None:
        """Wait until everything sent has left, at the end of a step; on an accelerator, its stream waits."""
        for leaving in self._leaving:
            while leaving:
                self._finish(leaving.popleft())

    def _finish(self, message: list[tuple[Any, Tensor]]) -> None:
        for work, tensor in message:
            self.groups[tensor.is_cpu].wait(work)


class _Way:
    """Messages of one kind along one edge, from this rank to ``peer`` or from there.

    ``book`` is what they were announced to hold. Both ends enter them in the same order: that of the wire.
    """

    def __init__(self, channel: Channel, edge: Edge, book: Book, peer: int) -> None:
        self._channel, self._edge, self._book, self.peer = channel, edge, book, peer
        self._link, self._check = channel.groups[True].link(peer), channel.peers.watch.raise_if_failed
        self._arriving: dict[int, tuple[Announcement, list[Tensor], Any]] = {}

    def _give(self, known: Announcement, tensors: Sequence[Tensor]) -> None:
        """Start sending a message as it was announced."""
        laid = list(map(plain, tensors)) if known.is_bare else known.to_wire(tensors)
        link = self._link
        if link is None or known.most_bytes >= link.below_bytes:
            self._channel.send(laid, self.peer)
            return
        for tensor in laid:
            link.send(tensor)

    def recv_ahead(self, m: int) -> None:
        """Start receiving what there is of microbatch ``m``, if that is known and waits for nothing.

        Right after a send gloo's own thread is at work, and holds a lock that a receive asks for: where that
        thread is taken off its core meanwhile, the rank stands still for as long.
        """
        known = self._book.settled.get(self._channel.signatures[m])
        link = self._link
        is_by_group = known is not None and (link is None or known.least_bytes >= link.below_bytes)
        if known is not None and is_by_group and known.n_bytes <= AHEAD_BYTES:
            self._receive(m, known)

    def recv(self, m: int) -> None:
        """Start receiving what there is of microbatch ``m``, unless that has begun."""
        if m not in self._arriving:
            self._receive(m, self._book.settled.get(self._channel.signatures[m]) or self._learn(m))

    def _receive(self, m: int, announced: Announcement) -> None:
        channel, link = self._channel, self._link
        molds = announced.known_molds or announced.molds(channel.device)
        under_way: Any = 0
        if link is None or announced.most_bytes >= link.below_bytes:
            buffers = list(map(LIKE, molds))
            under_way = [channel.groups[buffer.is_cpu].recv(buffer, self.peer) for buffer in buffers]
        else:
            buffers = list(map(torch.empty_like if announced.is_small else LIKE, molds))
            for buffer in buffers:
                under_way = link.expect(buffer)
        self._arriving[m] = announced, buffers, under_way

    def _wait(self, m: int) -> tuple[Announcement, list[Tensor]]:
        channel, link = self._channel, self._link
        announced, buffers, under_way = self._arriving.pop(m)
        if link is None or announced.most_bytes >= link.below_bytes:
            for work, buffer in zip(under_way, buffers, strict=True):
                channel.groups[buffer.is_cpu].wait(work)
        else:
            link.fill(under_way)
            self._check()
        return announced, buffers if announced.is_bare else announced.from_wire(buffers, channel.device)

    def _announce(self, m: int, found: Announcement) -> None:
        self._note(m, found)
        self._channel.peers.tell(found.told(), self.peer)

    def _learn(self, m: int) -> Announcement:
        """Wait for the other side's announcement of the next message."""
        found = Announcement.heard(self._channel.peers.hear(self.peer, Announced))
        self._note(m, found)
        return found

    def _note(self, m: int, found: Announcement) -> None:
        self._book.note(self._channel.signatures[m], found)
        if self._edge.values.varies:
            self._edge.gradients.unsettle()


class Values(_Way):
    """What the source of an edge gives for its destination."""

    def __init__(self, channel: Channel, edge: Edge, peer: int) -> None:
        super().__init__(channel, edge, edge.values, peer)

    def send(self, m: int) -> None:
        """Send what there is for microbatch ``m``."""
        edge = self._edge
        held, edge.outbox[m] = edge.outbox[m], None
        assert held is not None
        tensors, frame, flags = held
        known = self._book.settled.get(self._channel.signatures[m])
        if known is None:
            _check_plain(edge, tensors)
            known = Announcement(tuple(map(Form.of, tensors, flags)), frame)
            self._announce(m, known)
        elif not known.matches(tensors, frame, flags):
            raise StepError(
                f"stage {edge.source} gave {', '.join(str(tuple(t.shape)) for t in tensors)} for "
                f"{', '.join(edge.names)} where inputs of the same shapes gave {known} many times before; "
                "keep ops whose shapes depend on data this rarely in one stage"
            )
        self._give(known, tensors)

    def take(self, accept: Callable[[Edge, int, list[Any]], object], m: int) -> None:
        """Wait for the values of microbatch ``m``, and have their destination ``accept`` them.

        They are detached, and require gradients as at their source.
        """
        announced, tensors = self._wait(m)
        self._edge.keep_leaves(m, tensors, announced.flags)
        accept(self._edge, m, tensors if announced.frame is None else announced.frame.fill(tensors))


class Gradients(_Way):
    """What comes back along an edge: the gradients of what was sent."""

    def __init__(self, channel: Channel, edge: Edge, peer: int) -> None:
        super().__init__(channel, edge, edge.gradients, peer)

    def send(self, m: int) -> None:
        """Send what the edge's destination computed for microbatch ``m``."""
        edge = self._edge
        grads, edge.grads[m] = edge.grads[m] or (), None
        known = self._book.settled.get(self._channel.signatures[m])
        if known is None:
            dense = [None if g is None else _dense(g) for g in grads]
            forms = tuple(Form.of(g, True) for g in dense if g is not None)
            known = Announcement(forms, None, tuple(g is not None for g in grads))
            self._announce(m, known)
        self._give(known, self._as_announced(grads, known))

    def _as_announced(self, grads: Sequence[Tensor | None], known: Announcement) -> list[Tensor]:
        """The gradients that are sent: dense, and zero where there is none this time."""
        out: list[Tensor] = []
        for grad in grads:
            if grad is None or grad.layout is not torch.strided:
                break
            out.append(grad)
        if len(out) == len(grads) == len(known.tensors):
            return out
        out = []
        forms = iter(known.tensors)
        for grad, is_sent in zip(grads, known.present, strict=True):
            if not is_sent:
                if grad is not None:
                    raise StepError(
                        f"stage {self._edge.destination} returned a gradient for one of "
                        f"{', '.join(self._edge.names)} that had none for inputs of the same shapes many "
                        "times before; keep ops that use a value this rarely in the stage that computes it"
                    )
                continue
            form = next(forms)
            empty = form.empty(self._channel.device)
            out.append(form.from_wire(empty.zero_()) if grad is None else _dense(grad))
        return out

    def take(self, m: int) -> None:
        """Wait for the gradients of microbatch ``m`` and put them in the edge."""
        announced, tensors = self._wait(m)
        if len(tensors) == len(announced.present):
            self._edge.grads[m] = tensors
        else:
            rest = iter(tensors)
            self._edge.grads[m] = [next(rest) if present else None for present in announced.present]


def _check_plain(edge: Edge, tensors: Sequence[Tensor]) -> None:
    """Raise :class:`StepError` for what does not lie in one rank's memory as it is."""
    for kind in map(oddity, tensors):
        if kind == "a DTensor":
            raise StepError(
                f"stage {edge.source} gives a DTensor among {', '.join(edge.names)}; what crosses "
                "stages is a plain tensor: let the layer that makes it return one (use_local_output=True)"
            )
        if kind:
            raise StepError(
                f"stage {edge.source} gives a tensor that is {kind} among {', '.join(edge.names)}; what "
                "crosses ranks is dense: keep what makes it and what takes it in one stage (pin them to one)"
            )


def _dense(grad: Tensor) -> Tensor:
    return grad if grad.layout is torch.strided else grad.to_dense()
