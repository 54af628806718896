"""What a message holds, told once for each kind of message, and how its tensors lie on the wire.

Sending announcements and messages is left to ``channel``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from ... import accelerator
from ...errors import InputError
from ...hardware import DIRECT_BYTES
from .boundary import Frame
from .plain_values import dtype_of, name_of

__all__ = ["LIKE", "Announced", "Announcement", "Form", "oddity", "plain"]

PACK_BYTES = 1 << 14
HOST_PACK_BYTES = 1 << 20
"""Tensors below this size share one message, of an accelerator's and of the host's: a copy is then cheaper
than another message, which on the host wakes threads on both sides and takes cores from what is computed."""
ALIGN_BYTES = 16

ToldForm = tuple[tuple[int, ...], str, bool, bool, tuple[int, ...]]
"""A :class:`Form` in a message."""


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """All that is to be known of a tensor before it comes.

    ``is_cpu`` says that it is in the host's memory, whatever the pipeline runs on. ``order`` are its dims
    from the outermost in memory to the innermost; none where that is their own order, or memory has gaps.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    is_cpu: bool = False
    order: tuple[int, ...] = dataclasses.field(default=(), compare=False)

    @classmethod
    def of(cls, tensor: Tensor, requires_grad: bool = False) -> Form:
        """That of a dense tensor. Raises :class:`InputError` for one of another layout, as a sparse one."""
        if tensor.layout not in (torch.strided, torch.jagged):
            raise InputError(
                f"a tensor {list(tensor.shape)} of layout {tensor.layout} does not cross between ranks; let "
                "the model return to_dense() of it, or hand that on, or do not ask for outputs"
            )
        return cls(tuple(tensor.shape), tensor.dtype, requires_grad, tensor.is_cpu, _order(tensor))

    @property
    def n_bytes(self) -> int:
        """Of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize

    def told(self) -> ToldForm:
        """As part of a message."""
        return self.shape, name_of(self.dtype), self.requires_grad, self.is_cpu, self.order

    @classmethod
    def heard(cls, found: ToldForm) -> Form:
        """Of a message."""
        shape, name, requires_grad, is_cpu, order = found
        return cls(shape, dtype_of(name), requires_grad, is_cpu, order)

    def empty(self, device: torch.device) -> Tensor:
        """Contiguous memory for it, as it lies on the wire: in the host's where it is there."""
        shape = self._wire_shape if self.order else self.shape
        return torch.empty(shape, dtype=self.dtype, device="cpu" if self.is_cpu else device)

    def mold(self, device: torch.device) -> Tensor:
        """As :meth:`empty`, but without memory: what is made like it takes half the time to make."""
        here = torch.empty((), dtype=self.dtype, device="cpu" if self.is_cpu else device)
        return here.expand(self._wire_shape)

    def to_wire(self, tensor: Tensor) -> Tensor:
        """Contiguous, and with conjugation or negation that torch only notes carried out."""
        return plain(tensor.permute(self.order) if self.order else tensor)

    def from_wire(self, laid: Tensor) -> Tensor:
        """The tensor again, of what came."""
        if not self.order:
            return laid
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return laid.permute(back)

    def view(self, memory: Tensor) -> Tensor:
        """What lies in so many bytes, as on the wire."""
        return memory.view(self.dtype).view(self._wire_shape)

    @property
    def _wire_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[d] for d in self.order) if self.order else self.shape


NOTHING = Form((0,), torch.uint8)
LIKE = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)


def oddity(tensor: Tensor) -> str:
    """What a tensor is, in words, that does not lie in one rank's memory as it is; empty for all others."""
    if hasattr(tensor, "to_local"):
        return "a DTensor"
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    return "quantized" if tensor.is_quantized else ""


def plain(tensor: Tensor) -> Tensor:
    """A tensor as it lies on the wire where an announcement ``is_bare``: contiguous, as it is."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def _order(tensor: Tensor) -> tuple[int, ...]:
    if tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda d: -strides[d]))
    return order if tensor.permute(order).is_contiguous() else ()


class Announced(msgspec.Struct, frozen=True):
    """An announcement as a message."""

    tensors: list[ToldForm]
    frame: str | None
    present: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Announcement:
    """What a message holds: the form of each tensor; and the frame.

    For gradients ``present`` says which of the edge's differentiable tensors got one. ``is_bare``: on the
    wire are its tensors as they are. ``most_bytes`` and ``least_bytes`` are of the largest and the smallest
    that a link between a host's processes could carry; infinite where one, or every one, lies elsewhere.
    ``is_small``: all are for its socket.
    """

    tensors: tuple[Form, ...]
    frame: Frame | None = None
    present: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        sizes = [form.n_bytes for form in self.tensors]
        small = [
            i
            for i, (n, form) in enumerate(zip(sizes, self.tensors, strict=True))
            if 0 < n < (HOST_PACK_BYTES if form.is_cpu else PACK_BYTES)
        ]
        is_cpu = bool(small) and self.tensors[small[0]].is_cpu
        packed = [i for i in small if self.tensors[i].is_cpu == is_cpu]
        packed = packed if len(packed) > 1 else []
        room = [-(-sizes[i] // ALIGN_BYTES) * ALIGN_BYTES for i in packed]
        starts = list(itertools.accumulate(room, initial=0))
        alone = tuple(i for i, n in enumerate(sizes) if n and i not in packed)
        pack = Form((starts[-1],), torch.uint8, is_cpu=is_cpu)
        on_wire = (*(self.tensors[i] for i in alone), *([pack] if packed else ()))
        derived = {
            "n_bytes": sum(sizes),
            "flags": tuple(form.requires_grad for form in self.tensors),
            "alone": alone,
            "is_bare": not packed and 0 not in sizes and not any(form.order for form in self.tensors),
            "on_wire": on_wire,
            "most_bytes": max((f.n_bytes if f.is_cpu else math.inf for f in on_wire), default=0),
            "least_bytes": min((f.n_bytes for f in on_wire if f.is_cpu), default=math.inf),
            "is_small": all(f.is_cpu and f.n_bytes < DIRECT_BYTES for f in on_wire),
            "packed": tuple((i, a, a + sizes[i]) for i, a in zip(packed, starts, strict=False)),
            "pack": pack,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    n_bytes: int = dataclasses.field(default=0, init=False, compare=False)
    flags: tuple[bool, ...] = dataclasses.field(default=(), init=False, compare=False)
    is_bare: bool = dataclasses.field(default=False, init=False, compare=False)
    most_bytes: float = dataclasses.field(default=0, init=False, compare=False)
    least_bytes: float = dataclasses.field(default=math.inf, init=False, compare=False)
    is_small: bool = dataclasses.field(default=False, init=False, compare=False)
    alone: tuple[int, ...] = dataclasses.field(default=(), init=False, compare=False)
    packed: tuple[tuple[int, int, int], ...] = dataclasses.field(default=(), init=False, compare=False)
    pack: Form = dataclasses.field(default=NOTHING, init=False, compare=False)
    on_wire: tuple[Form, ...] = dataclasses.field(default=(), init=False, compare=False)
    known_molds: Sequence[Tensor] = dataclasses.field(default=(), init=False, compare=False)

    def told(self) -> Announced:
        """As a message."""
        text = None if self.frame is None else self.frame.to_text()
        return Announced([form.told() for form in self.tensors], text, self.present)

    @classmethod
    def heard(cls, found: Announced) -> Announcement:
        """Of a message."""
        frame = None if found.frame is None else Frame.from_text(found.frame)
        return cls(tuple(map(Form.heard, found.tensors)), frame, found.present)

    def matches(self, tensors: Sequence[Tensor], frame: Frame | None, flags: tuple[bool, ...]) -> bool:
        """Whether a message is as announced; runs for every message sent."""
        if flags != self.flags or frame != self.frame:
            return False
        for tensor, form in zip(tensors, self.tensors, strict=True):
            if tensor.shape != form.shape or tensor.dtype is not form.dtype or tensor.is_cpu != form.is_cpu:
                return False
        return True

    def molds(self, device: torch.device) -> Sequence[Tensor]:
        """What is on the wire, to be made :data:`LIKE`: the large tensors, then the pack.

        Without memory, unless it is small: ``torch.empty_like`` alone, which is faster, makes such ones.
        """
        if len(self.known_molds) != len(self.on_wire):
            molds = [(form.empty if self.is_small else form.mold)(device) for form in self.on_wire]
            object.__setattr__(self, "known_molds", molds)
        return self.known_molds

    def to_wire(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors as :meth:`molds` lay them out; what has no numbers is not sent."""
        laid = [self.tensors[i].to_wire(tensors[i]) for i in self.alone]
        if self.packed:
            pack = self.pack.empty(tensors[self.packed[0][0]].device)
            for i, start, end in self.packed:
                # as bytes: of some dtypes torch copies nothing else
                pack[start:end].copy_(accelerator.raw(self.tensors[i].to_wire(tensors[i])))
            laid.append(pack)
        return laid

    def from_wire(self, buffers: list[Tensor], device: torch.device) -> list[Tensor]:
        """The tensors again, out of filled buffers."""
        found = dict(zip(self.alone, buffers, strict=False))
        for i, start, end in self.packed:
            # as data, so that changing one in place is no change of the others to autograd
            found[i] = self.tensors[i].view(buffers[-1].data[start:end])
        return [
            form.from_wire(found[i] if i in found else form.empty(device))
            for i, form in enumerate(self.tensors)
        ]

    def __str__(self) -> str:
        return ", ".join(f"{form.dtype}{list(form.shape)}" for form in self.tensors) or "no tensor"
