"""What a message holds, told once for each kind of message, and how its tensors lie on the wire.

Sending announcements and messages is left to ``channel``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from .boundary import Frame
from .values import dtype_of, name_of

__all__ = ["Announced", "Announcement"]

PACK_BYTES = 1 << 14
"""Tensors below this size share one message: a copy is then cheaper than another message."""
ALIGN_BYTES = 16


class Announced(msgspec.Struct, frozen=True):
    """An announcement as a message."""

    tensors: list[tuple[tuple[int, ...], str, bool]]
    frame: str | None
    present: tuple[bool, ...]


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
        object.__setattr__(self, "flags", tuple(flag for _, _, flag in self.tensors))

    packed: tuple[int, ...] = dataclasses.field(default=(), init=False, compare=False)
    flags: tuple[bool, ...] = dataclasses.field(default=(), init=False, compare=False)

    def told(self) -> Announced:
        """As a message."""
        tensors = [(shape, name_of(dtype), flag) for shape, dtype, flag in self.tensors]
        return Announced(tensors, None if self.frame is None else self.frame.to_text(), self.present)

    @classmethod
    def heard(cls, found: Announced) -> Announcement:
        """Of a message."""
        tensors = tuple((shape, dtype_of(name), flag) for shape, name, flag in found.tensors)
        return cls(tensors, None if found.frame is None else Frame.from_text(found.frame), found.present)

    def _bytes(self) -> list[int]:
        return [torch.Size(shape).numel() * dtype.itemsize for shape, dtype, _ in self.tensors]

    @property
    def n_bytes(self) -> int:
        """Of the tensors a message holds."""
        return sum(self._bytes())

    @property
    def _offsets(self) -> list[int]:
        """Where each packed tensor begins in the pack, and at last where it ends."""
        sizes, offsets = self._bytes(), [0]
        for i in self.packed:
            offsets.append(offsets[-1] + -(-sizes[i] // ALIGN_BYTES) * ALIGN_BYTES)
        return offsets

    def matches(self, tensors: Sequence[Tensor], frame: Frame | None, flags: Sequence[bool]) -> bool:
        """Whether a message is as announced; runs for every message sent."""
        if len(tensors) != len(self.tensors) or frame != self.frame:
            return False
        for tensor, flag, (shape, dtype, flagged) in zip(tensors, flags, self.tensors, strict=True):
            if tensor.shape != shape or tensor.dtype is not dtype or flag != flagged:
                return False
        return True

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

    def to_wire(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors as :meth:`buffers` lays them out, contiguous."""
        if not self.packed:
            return [_plain(t) for t in tensors]
        pack = torch.empty(self._offsets[-1], dtype=torch.uint8, device=tensors[0].device)
        for view, i in zip(self._views(pack), self.packed, strict=True):
            view.copy_(tensors[i])
        return [_plain(t) for i, t in enumerate(tensors) if i not in self.packed] + [pack]

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

    def __str__(self) -> str:
        return ", ".join(f"{dtype}{list(shape)}" for shape, dtype, _ in self.tensors) or "no tensor"


def _plain(tensor: Tensor) -> Tensor:
    """Contiguous, and with conjugation or negation that torch only notes carried out."""
    return tensor.clone() if tensor.is_conj() or tensor.is_neg() else tensor.contiguous()
