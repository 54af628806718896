"""Moves messages between ranks over ``torch.distributed``, in exactly the order it is told.

That order is left to ``schedule``, what to do when a rank fails to ``failure``.

Shapes are announced ahead of each message until an edge is settled: then only ahead of the first for input
shapes that are new, as both sides remember it. An edge whose shapes differ for equal input shapes (they
depend on data) never settles. Tensors are sent bare, small ones of a message packed together.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import accelerator
from ...errors import StepError
from .announcement import Announced, Announcement, Form, oddity
from .boundary import Book, Edge
from .group import Group
from .link import SENT
from .peers import Peers

__all__ = ["Channel"]

LAG = 2
"""Messages to one peer under way before the oldest is waited for: by the host, on an accelerator by its
stream, which may then use that message's memory again."""

Arriving = tuple[Announcement, list[Tensor], list[Any]]


class Channel:
    """One rank's end of all its connections.

    ``signatures`` (set per step) are what shapes depend on, one per microbatch.
    """

    def __init__(self, peers: Peers, device: torch.device) -> None:
        self._peers, self._group, self._device = peers, peers.group, device
        self._is_async = accelerator.is_async(device)
        self._arriving: dict[tuple[str, Edge, int], Arriving] = {}
        self._leaving: list[collections.deque[list[tuple[Any, Tensor]]]] = [
            collections.deque() for _ in range(peers.n_ranks)
        ]
        self.signatures: Sequence[int] = ()

    # -- values -------------------------------------------------------------------------------------

    def send_values(self, edge: Edge, m: int, peer: int) -> None:
        """Send what the source of ``edge`` gave for microbatch ``m``."""
        held, edge.outbox[m] = edge.outbox[m], None
        assert held is not None
        tensors, frame, flags = held
        known = edge.values.settled.get(self.signatures[m])
        if known is None:
            _check_plain(edge, tensors)
            known = Announcement(tuple(map(Form.of, tensors, flags)), frame)
            self._announce("F", edge, m, peer, known)
        elif not known.matches(tensors, frame, flags):
            raise StepError(
                f"stage {edge.source} gave {', '.join(str(tuple(t.shape)) for t in tensors)} for "
                f"{', '.join(edge.names)} where inputs of the same shapes gave {known} many times before; "
                "keep ops whose shapes depend on data this rarely in one stage"
            )
        self._send(known.to_wire(tensors), peer)

    def recv_values(self, edge: Edge, m: int, peer: int) -> None:
        """Start receiving the values of microbatch ``m``."""
        self._recv("F", edge, m, peer)

    def take_values(self, edge: Edge, m: int) -> list[Any]:
        """Wait for the values of microbatch ``m``: detached, requiring gradients as at their source."""
        announced, tensors = self._wait("F", edge, m)
        edge.keep_leaves(m, tensors, announced.flags)
        return tensors if announced.frame is None else announced.frame.fill(tensors)

    # -- gradients ----------------------------------------------------------------------------------

    def send_grads(self, edge: Edge, m: int, peer: int) -> None:
        """Send the gradients that the destination of ``edge`` computed for microbatch ``m``."""
        grads, edge.grads[m] = edge.grads[m] or (), None
        known = edge.gradients.settled.get(self.signatures[m])
        if known is None:
            dense = [None if g is None else _dense(g) for g in grads]
            forms = tuple(Form.of(g, True) for g in dense if g is not None)
            known = Announcement(forms, None, tuple(g is not None for g in grads))
            self._announce("B", edge, m, peer, known)
        self._send(known.to_wire(self._as_announced(edge, grads, known)), peer)

    def _as_announced(self, edge: Edge, grads: Sequence[Tensor | None], known: Announcement) -> list[Tensor]:
        """The gradients that are sent: dense, and zero where there is none this time."""
        dense = [grad for grad in grads if grad is not None and grad.layout is torch.strided]
        if len(dense) == len(grads) == len(known.tensors):
            return dense
        out = []
        forms = iter(known.tensors)
        for grad, is_sent in zip(grads, known.present, strict=True):
            if not is_sent:
                if grad is not None:
                    raise StepError(
                        f"stage {edge.destination} returned a gradient for one of {', '.join(edge.names)} "
                        "that had none for inputs of the same shapes many times before; keep ops that use a "
                        "value this rarely in the stage that computes it"
                    )
                continue
            form = next(forms)
            out.append(form.from_wire(form.empty(self._device).zero_()) if grad is None else _dense(grad))
        return out

    def recv_grads(self, edge: Edge, m: int, peer: int) -> None:
        """Start receiving the gradients of what was sent along ``edge``."""
        self._recv("B", edge, m, peer)

    def take_grads(self, edge: Edge, m: int) -> None:
        """Wait for the gradients of microbatch ``m`` and put them in ``edge``."""
        announced, tensors = self._wait("B", edge, m)
        if len(tensors) == len(announced.present):
            edge.grads[m] = tensors
        else:
            rest = iter(tensors)
            edge.grads[m] = [next(rest) if present else None for present in announced.present]

    # -- the wire -----------------------------------------------------------------------------------

    def _announce(self, kind: str, edge: Edge, m: int, peer: int, found: Announcement) -> None:
        self._note(kind, edge, m, found)
        self._peers.tell(found.told(), peer)

    def _learn(self, kind: str, edge: Edge, m: int, peer: int) -> Announcement:
        """Wait for the other side's announcement of the next message."""
        found = Announcement.heard(self._peers.hear(peer, Announced))
        self._note(kind, edge, m, found)
        return found

    def _note(self, kind: str, edge: Edge, m: int, found: Announcement) -> None:
        """Both ends of an edge note its messages in the same order: that of the wire."""
        self._book(kind, edge).note(self.signatures[m], found)
        if edge.values.varies:
            edge.gradients.unsettle()

    def _book(self, kind: str, edge: Edge) -> Book:
        return edge.values if kind == "F" else edge.gradients

    def _recv(self, kind: str, edge: Edge, m: int, peer: int) -> None:
        announced = self._book(kind, edge).settled.get(self.signatures[m])
        announced = announced or self._learn(kind, edge, m, peer)
        buffers = announced.buffers(self._device)
        works = [self._carrier(b).recv(b, peer) for b in buffers]
        self._arriving[kind, edge, m] = (announced, buffers, works)

    def _carrier(self, tensor: Tensor) -> Group:
        """What moves a tensor: another group where it is in the host's memory and the pipeline is not."""
        return self._peers.control if self._is_async and tensor.is_cpu else self._group

    def _wait(self, kind: str, edge: Edge, m: int) -> tuple[Announcement, list[Tensor]]:
        announced, buffers, works = self._arriving.pop((kind, edge, m))
        for work, buffer in zip(works, buffers, strict=True):
            self._carrier(buffer).wait(work)
        return announced, announced.from_wire(buffers, self._device)

    def _send(self, tensors: Sequence[Tensor], peer: int) -> None:
        message = []
        for tensor in tensors:
            work = self._carrier(tensor).send(tensor, peer)
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
            self._carrier(tensor).wait(work)


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
