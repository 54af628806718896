"""What autograd keeps of a forward, in the host's memory until backward asks for it.

Whether it is kept there is said by the plan; what that costs is left to the planning half.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ... import accelerator

__all__ = ["offloaded"]


@contextlib.contextmanager
def offloaded(device: torch.device, staying: Callable[[], Iterator[Tensor]]) -> Iterator[None]:
    """Within it what autograd keeps goes to the host at once, and comes back when its backward runs.

    Each stretch of memory is copied once each way, however many ops keep it, in order with the device's
    work: the host does not wait. What lies in the memory of ``staying`` tensors (weights, a stage's inputs)
    is there in any case and stays, as does what no plain copy holds: sparse tensors, subclasses, conjugates.
    Parts that the model itself checkpoints keep what they run again from on the device.
    """
    there = _Host(device, staying)
    with torch.autograd.graph.saved_tensors_hooks(there.pack, _unpack):
        yield


@dataclasses.dataclass(slots=True, eq=False)
class _Stretch:
    """A stretch of memory as it was when it was kept; ``back`` while those that keep it still want it."""

    values: Tensor
    device: torch.device
    n_waiting: int = 0
    back: Tensor | None = None


@dataclasses.dataclass(slots=True, eq=False)
class _Kept:
    """A tensor as a view of a stretch."""

    stretch: _Stretch
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_waiting: bool = True


class _Host:
    """What one forward keeps on the host."""

    def __init__(self, device: torch.device, staying: Callable[[], Iterator[Tensor]]) -> None:
        self.device, self.staying = device, staying
        self.stays: frozenset[int] | None = None
        # a storage's number is another's once it is gone, so the storage is asked for too
        self.known: dict[tuple[Any, ...], tuple[weakref.ref[Any], _Stretch]] = {}

    def pack(self, tensor: Tensor) -> Tensor | _Kept:
        if type(tensor) is not Tensor or tensor.device != self.device or not _is_plain(tensor):
            return tensor
        if self.stays is None:
            plain = (t for t in self.staying() if type(t) in (Tensor, nn.Parameter))
            self.stays = frozenset(t.untyped_storage()._cdata for t in plain if t.layout is torch.strided)
        storage = tensor.untyped_storage()
        if storage._cdata in self.stays:
            return tensor
        start, stop = _stretch_of(tensor)
        key = storage._cdata, tensor._version, tensor.dtype, start, stop
        of, stretch = self.known.get(key, (None, None))
        if stretch is None or of is None or of() is not storage:
            with torch.no_grad():
                stretch = _Stretch(
                    accelerator.to_host(tensor.as_strided((stop - start,), (1,), start)), self.device
                )
            self.known[key] = weakref.ref(storage), stretch
        stretch.n_waiting += 1
        return _Kept(stretch, tensor.size(), tensor.stride(), int(tensor.storage_offset()) - start)


def _unpack(kept: Tensor | _Kept) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    stretch = kept.stretch
    back = stretch.back
    if back is None:
        back = accelerator.from_host(stretch.values, stretch.device)
    stretch.n_waiting -= kept.is_waiting
    kept.is_waiting = False
    stretch.back = back if stretch.n_waiting else None
    with torch.no_grad():
        return back.as_strided(kept.size, kept.stride, kept.offset)


def _is_plain(tensor: Tensor) -> bool:
    is_strided = tensor.layout is torch.strided and not tensor.is_quantized
    return is_strided and tensor.numel() > 0 and not (tensor.is_conj() or tensor.is_neg())


def _stretch_of(tensor: Tensor) -> tuple[int, int]:
    """From where to where, in elements, memory is copied for a tensor: all of it, or a part under half."""
    whole = tensor.untyped_storage().nbytes() // tensor.itemsize
    start = int(tensor.storage_offset())
    reach = (step * (n - 1) for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    stop = start + 1 + sum(reach)
    return (start, stop) if 2 * (stop - start) < whole else (0, whole)
