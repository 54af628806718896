"""Moves messages between ranks over ``torch.distributed``, in exactly the order it is told.

That order is left to ``schedule``, what to do when a rank fails to ``failure``.

Shapes travel once: the first message of a kind (same edge, direction and input shapes) is announced in the
store, and both sides remember it. Tensors are then sent bare, small ones of a message packed together.
"""

from __future__ import annotations

import collections
import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import StepError
from .boundary import Edge, Frame
from .group import FOREVER
from .peers import Peers, unpickle

__all__ = ["Announcement", "Channel"]

PACK_BYTES = 1 << 14
"""Tensors below this size share one message: a copy is then cheaper than another message."""
ALIGN_BYTES = 16
LAG = 8
"""Unfinished sends to one peer before the oldest is waited for."""


@dataclasses.dataclass(frozen=True)
class Announcement:
    """What a message holds: per tensor its shape, dtype and whether it requires a gradient; and the frame.

    For gradients ``present`` says which of the edge's differentiable tensors got one.
    """

    tensors: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]
    frame: Frame | None = None
    present: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        small = [i for i, n in enumerate(self._bytes()) if n < PACK_BYTES]
        object.__setattr__(self, "packed", tuple(small) if len(small) > 1 else ())

    packed: tuple[int, ...] = dataclasses.field(default=(), init=False, compare=False)

    def _bytes(self) -> list[int]:
        return [torch.Size(shape).numel() * dtype.itemsize for shape, dtype, _ in self.tensors]

    @property
    def _offsets(self) -> list[int]:
        """Where each packed tensor begins in the pack, and at last where it ends."""
        sizes, offsets = self._bytes(), [0]
        for i in self.packed:
            offsets.append(offsets[-1] + -(-sizes[i] // ALIGN_BYTES) * ALIGN_BYTES)
        return offsets

    def buffers(self, device: torch.device) -> list[Tensor]:
        """Empty memory for what is on the wire: the large tensors, then the pack."""
        alone = [
            torch.empty(shape, dtype=dtype, device=device)
            for i, (shape, dtype, _) in enumerate(self.tensors)
            if i not in self.packed
        ]
        if self.packed:
            alone.append(torch.empty(self._offsets[-1], dtype=torch.uint8, device=device))
        return alone

    def to_wire(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors as :meth:`buffers` lays them out, contiguous."""
        if not self.packed:
            return [t.contiguous() for t in tensors]
        pack = torch.empty(self._offsets[-1], dtype=torch.uint8, device=tensors[0].device)
        for view, i in zip(self._views(pack), self.packed, strict=True):
            view.copy_(tensors[i])
        return [t.contiguous() for i, t in enumerate(tensors) if i not in self.packed] + [pack]

    def from_wire(self, buffers: list[Tensor]) -> list[Tensor]:
        """The tensors again, out of filled buffers."""
        if not self.packed:
            return buffers
        views = iter(self._views(buffers[-1]))
        alone = iter(buffers)
        return [next(views) if i in self.packed else next(alone) for i in range(len(self.tensors))]

    def _views(self, pack: Tensor) -> list[Tensor]:
        offsets, sizes = self._offsets, self._bytes()
        return [
            pack[start : start + sizes[i]].view(self.tensors[i][1]).view(self.tensors[i][0])
            for i, start in zip(self.packed, offsets, strict=False)
        ]


class Channel:
    """One rank's end of all its connections.

    ``signatures`` (set per step) are what shapes depend on, one per microbatch.
    """

    def __init__(self, peers: Peers, device: torch.device) -> None:
        self._peers, self._group, self._device = peers, peers.group, device
        self._known: dict[tuple[Any, ...], Announcement] = {}
        self._arriving: dict[tuple[str, Edge, int], tuple[Announcement, list[Tensor], list[Any]]] = {}
        self._leaving: dict[int, collections.deque[tuple[Any, Tensor]]] = collections.defaultdict(
            collections.deque
        )
        self.signatures: Sequence[int] = ()

    # -- values -------------------------------------------------------------------------------------

    def send_values(self, edge: Edge, m: int, peer: int) -> None:
        """Send what the source of ``edge`` gave for microbatch ``m``."""
        held, edge.outbox[m] = edge.outbox[m], None
        assert held is not None
        tensors, frame, flags = held
        found = Announcement(
            tuple((tuple(t.shape), t.dtype, flag) for t, flag in zip(tensors, flags, strict=True)), frame
        )
        known = self._announce("F", edge, m, found)
        if known != found:
            raise StepError(
                f"stage {edge.source} gave {_words(found)} for {', '.join(edge.names)} where inputs of the "
                f"same shapes gave {_words(known)} before; values whose shape depends on data cannot cross "
                "stages: keep the ops around them in one stage"
            )
        self._send(known.to_wire(tensors), peer)

    def recv_grads(self, edge: Edge, m: int, peer: int) -> None:
        """Start receiving the gradients of what was sent along ``edge``."""
        self._recv("B", edge, m, peer)

    def take_grads(self, edge: Edge, m: int) -> None:
        """Wait for the gradients of microbatch ``m`` and put them in ``edge``."""
        announced, tensors = self._wait("B", edge, m)
        rest = iter(tensors)
        edge.grads[m] = [next(rest) if present else None for present in announced.present]

    # -- gradients ----------------------------------------------------------------------------------

    def recv_values(self, edge: Edge, m: int, peer: int) -> None:
        """Start receiving the values of microbatch ``m``."""
        self._recv("F", edge, m, peer)

    def take_values(self, edge: Edge, m: int) -> list[Any]:
        """Wait for the values of microbatch ``m``: detached, requiring gradients as at their source."""
        announced, tensors = self._wait("F", edge, m)
        grown = edge.grow(m, tensors, [flag for _, _, flag in announced.tensors])
        return grown if announced.frame is None else announced.frame.fill(grown)

    def send_grads(self, edge: Edge, m: int, peer: int) -> None:
        """Send the gradients that the destination of ``edge`` computed for microbatch ``m``."""
        grads, edge.grads[m] = edge.grads[m] or (), None
        dense = [g.to_dense() if g is not None and g.layout is not torch.strided else g for g in grads]
        signature = self.signatures[m]
        values = self._known["F", edge.source, edge.destination, signature]
        shapes = [t for t in values.tensors if t[2]]
        known = self._known.get(("B", edge.source, edge.destination, signature))
        if known is None:
            present = tuple(g is not None for g in dense)
            known = Announcement(tuple(t for t, p in zip(shapes, present, strict=True) if p), None, present)
        known = self._announce("B", edge, m, known)
        out = []
        for grad, had, (shape, dtype, _) in zip(dense, known.present, shapes, strict=True):
            if grad is not None and not had:
                raise StepError(
                    f"stage {edge.destination} returned a gradient for one of {', '.join(edge.names)} that "
                    "had none for inputs of the same shapes before; keep ops that use a value only "
                    "sometimes in the stage that computes it"
                )
            if had:
                out.append(torch.zeros(shape, dtype=dtype, device=self._device) if grad is None else grad)
        self._send(known.to_wire(out), peer)

    # -- the wire -----------------------------------------------------------------------------------

    def _announce(self, kind: str, edge: Edge, m: int, found: Announcement) -> Announcement:
        key = (kind, edge.source, edge.destination, self.signatures[m])
        known = self._known.get(key)
        if known is None:
            self._known[key] = known = found
            self._peers.store.set(self._name(key), pickle.dumps(found))
        return known

    def _name(self, key: tuple[Any, ...]) -> str:
        return "shapes/" + "/".join(map(str, key))

    def _learn(self, key: tuple[Any, ...]) -> Announcement:
        """Wait for the other side's announcement; the first message of a new signature only."""
        name = self._name(key)
        found: Announcement = unpickle(self._peers.fetch(name))
        self._peers.store.delete_key(name)
        self._known[key] = found
        return found

    def _recv(self, kind: str, edge: Edge, m: int, peer: int) -> None:
        key = (kind, edge.source, edge.destination, self.signatures[m])
        announced = self._known.get(key) or self._learn(key)
        buffers = announced.buffers(self._device)
        works = [self._group.recv(b, peer) for b in buffers]
        self._arriving[kind, edge, m] = (announced, buffers, works)

    def _wait(self, kind: str, edge: Edge, m: int) -> tuple[Announcement, list[Tensor]]:
        announced, buffers, works = self._arriving.pop((kind, edge, m))
        for work in works:
            work.wait(FOREVER)
        return announced, announced.from_wire(buffers)

    def _send(self, tensors: Sequence[Tensor], peer: int) -> None:
        leaving = self._leaving[peer]
        for tensor in tensors:
            leaving.append((self._group.send(tensor, peer), tensor))
        while len(leaving) > LAG:
            leaving.popleft()[0].wait(FOREVER)

    def flush(self) -> None:
        """Wait until everything sent has left; at the end of a step."""
        for leaving in self._leaving.values():
            while leaving:
                leaving.popleft()[0].wait(FOREVER)


def _words(announced: Announcement) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype, _ in announced.tensors) or "no tensor"
