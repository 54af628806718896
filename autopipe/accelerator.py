"""What the device a tensor is on can do, whichever it is: streams, times, random numbers, memory, messages.

CUDA, ROCm, XPU, Ascend and the rest go one way, through ``torch.accelerator`` and the device's own module;
figures that are one maker's are left to ``hardware`` and ``measure``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import socket
import sys
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import InputError

__all__ = [
    "CASTING",
    "Drawing",
    "Later",
    "backend",
    "current",
    "default_generator",
    "empty_cache",
    "from_host",
    "has_begun",
    "held_bytes",
    "identity",
    "is_async",
    "keep_freed",
    "kinds",
    "mark",
    "memory",
    "name",
    "of_rank",
    "peak_bytes",
    "raw",
    "reset_peak",
    "seconds",
    "synchronize",
    "to_host",
    "total_bytes",
    "upload",
    "using",
]

CASTING = ("cpu", "cuda", "xpu", "hpu", "mps", "mtia")
"""Kinds of device that torch has an autocast for; a plugin's joins them under its own name."""


def kinds() -> tuple[str, ...]:
    """All kinds of device whose autocast may be in force."""
    here = torch.accelerator.current_accelerator()
    return CASTING if here is None or here.type in CASTING else (*CASTING, here.type)


def raw(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes, a tensor [n_bytes] that shares it."""
    # a lone element is contiguous whatever its strides are, and no bytes are seen by those
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def memory(tensor: Tensor) -> Any:
    """The bytes of a contiguous tensor of any dtype on the host, as a buffer; the tensor must outlive it."""
    return _bytes(tensor.nbytes).from_address(tensor.data_ptr())


@functools.lru_cache(maxsize=256)
def _bytes(n: int) -> Any:
    """The type of so many bytes, which takes as long to make as a small message to send."""
    return ctypes.c_char * n


def is_async(device: torch.device) -> bool:
    """Whether the device works on after the host has gone on."""
    here = torch.accelerator.current_accelerator()
    return here is not None and device.type == here.type


def current() -> torch.device:
    """The accelerator that is current in this thread; the CPU where there is none."""
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None:
        return torch.device("cpu")
    return torch.device(here.type, torch.accelerator.current_device_index())


def has_begun() -> bool:
    """Whether this process has opened an accelerator, after which it must not fork."""
    here = torch.accelerator.current_accelerator()
    asked = None if here is None else getattr(torch.get_device_module(here), "is_initialized", None)
    return asked is not None and bool(asked())


def using(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Within it the device is the current one of this thread."""
    if not is_async(device):
        return contextlib.nullcontext()
    return torch.accelerator.device_index(_index(device))


class Drawing(Protocol):
    """What random ops draw from, as far as it is used here: a ``torch.Generator``, say."""

    def manual_seed(self, seed: int) -> Any: ...
    def get_state(self) -> torch.Tensor: ...
    def set_state(self, state: torch.Tensor) -> Any: ...


def default_generator(device: torch.device) -> Drawing | None:
    """What random ops on the device draw from; None where there is none to be had."""
    if not is_async(device):
        return None if device.type != "cpu" else torch.default_generator
    made = getattr(torch.get_device_module(device), "default_generators", ())
    return made[_index(device)] if len(made) > _index(device) else _OfModule(device)


class _OfModule:
    """The generator of a device whose module does not show it, and only says what may be done with it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)

    def manual_seed(self, seed: int) -> None:
        with using(self._device):
            self._module.manual_seed(seed)

    def get_state(self) -> torch.Tensor:
        with using(self._device):
            return cast(torch.Tensor, self._module.get_rng_state())

    def set_state(self, state: torch.Tensor) -> None:
        with using(self._device):
            self._module.set_rng_state(state)


def mark(device: torch.device) -> torch.Event:
    """A point in time on the device's current stream, for :func:`seconds`."""
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def seconds(start: torch.Event, end: torch.Event) -> float:
    """Between two marks that the device has passed."""
    return float(start.elapsed_time(end)) * 1e-3


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if is_async(device):
        torch.accelerator.synchronize(device)


def backend(device: torch.device) -> str:
    """The process-group backend that moves the device's tensors: nccl, xccl, hccl, gloo."""
    return str(dist.get_default_backend_for_device(device)) if is_async(device) else "gloo"


def is_carried(device: torch.device) -> bool:
    """Whether the default process group carries tensors of this kind of device.

    One that was made without naming a backend has one for each kind.
    """
    if not is_async(device):
        return device.type == "cpu"
    config = dist.distributed_c10d.BackendConfig(dist.Backend(dist.get_backend_config()))
    return bool(config.get_device_backend_map().get(device.type) == backend(device))


def of_rank(*, carried: bool = True) -> torch.device | None:
    """The accelerator that is this rank's, where the default process group carries its tensors.

    That of ``LOCAL_RANK``, which becomes the current one, else the current one. None where there is none.
    Whatever the group carries, where it need not be ``carried``.
    """
    here = current()
    if here.type == "cpu" or (carried and not is_carried(here)):
        return None
    local = os.environ.get("LOCAL_RANK")
    if local is not None:
        if not local.isdecimal():
            raise InputError(f"LOCAL_RANK is {local!r}; it is the rank's number on its host: 0, 1 and so on")
        here = torch.device(here.type, int(local) % torch.accelerator.device_count())
        torch.accelerator.set_device_index(here)
    return here


def name(device: torch.device) -> str:
    """What the maker calls it; the device's type where its module does not say."""
    asked = getattr(torch.get_device_module(device), "get_device_name", None) if is_async(device) else None
    return str(asked(device)) if asked is not None else device.type


def _is_counted(device: torch.device) -> bool:
    return is_async(device) and device.type != "mps"  # whose allocator does not count


def identity(device: torch.device) -> str:
    """What tells the card it is on from every other of the job; empty for the host.

    Instances of one card (MIG) are on the same: NCCL takes one rank of each PCI address of a host.
    """
    if not is_async(device):
        return ""
    asked = getattr(torch.get_device_module(device), "get_device_properties", None)
    properties = None if asked is None else asked(device)
    known = _address(properties) or getattr(properties, "uuid", None)
    if known is None:  # the first that one rank sees may be another's second
        seen = sorted((k, v) for k, v in os.environ.items() if k.endswith(_MASKS))
        known = f"{device} of {seen}" if seen else str(device)
    return f"{socket.gethostname()}/{known}"


def _address(properties: Any) -> str:
    """Where on the PCI bus a card is; empty where its module does not say.

    AMD's is not asked: the partitions of a card, all at one address, are devices of their own to its library.
    """
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return "" if None in parts or torch.version.hip else ":".join(map(str, parts))


_MASKS = "VISIBLE_DEVICES", "AFFINITY_MASK"
"""How the variables end by which makers let a process see some of the devices."""


def reset_peak(device: torch.device) -> None:
    """Count the most that is held from here on."""
    if _is_counted(device):
        torch.accelerator.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """The most that the allocator held since :func:`reset_peak`; None where nobody counts."""
    return torch.accelerator.max_memory_allocated(device) if _is_counted(device) else None


def held_bytes(device: torch.device) -> int:
    """What the allocator holds now."""
    return torch.accelerator.memory_allocated(device) if _is_counted(device) else 0


def total_bytes(device: torch.device) -> int | None:
    """The device's memory; None where nobody says."""
    return torch.accelerator.get_memory_info(device)[1] if _is_counted(device) else None


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device; nobody waits, and one on the host may be changed as soon as this returns.

    A copy out of pinned memory is read only when the device comes to it, and one out of other memory makes
    the host wait; so it goes by way of pinned memory of its own.
    """
    if tensor.device == device:
        return tensor
    if not tensor.is_cpu or not is_async(device):
        return tensor.to(device, non_blocking=is_async(device))
    is_odd = tensor.is_quantized or tensor.requires_grad or hasattr(tensor, "to_local")
    if device.type == "mps" or is_odd or tensor.layout is not torch.strided:
        return tensor.to(device)
    staged = torch.empty_like(tensor, pin_memory=True)
    return staged.copy_(tensor).to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory, which is there when the device has come to it; nobody waits.

    In pinned memory, which :func:`from_host` takes back in the order of the device's work.
    """
    if not is_async(tensor.device) or tensor.device.type == "mps":
        return tensor.to("cpu", copy=True)
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
    return there.copy_(tensor, non_blocking=True)


def from_host(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """What :func:`to_host` gave, on the device again; nobody waits, and nobody writes to ``values``."""
    return values.to(device, non_blocking=True, copy=True)


class Later:
    """A tensor's values, read when they have come without a wait for the device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._is_async = is_async(tensor.device)
        if self._is_async:
            there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
            self._values = there.copy_(tensor, non_blocking=True)
            self._there = torch.Event(tensor.device)
            self._there.record(torch.accelerator.current_stream(tensor.device))
        else:
            self._values = tensor

    def has_come(self) -> bool:
        """Whether they can be read."""
        return not self._is_async or bool(self._there.query())

    def read(self) -> Any:
        """The values as plain numbers."""
        return self._values.tolist()


def empty_cache(device: torch.device) -> None:
    """Give back what the allocator keeps for later."""
    if is_async(device):
        torch.accelerator.empty_cache()


_MAPPED_BYTES, _KEPT_BYTES = 31 << 20, 1 << 30
"""Blocks from which on each is given back at its end (glibc's limit cannot pass 32 MiB), and how much of what
was freed beside them a process keeps at most."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""What ``malloc.h`` calls them."""


def keep_freed(device: torch.device) -> None:
    """Have the host's C allocator (glibc) keep freed memory for what comes next, not fault it in anew.

    By limits of its own it gives back the large blocks of a new process, and later whatever is free at its
    heap's end beyond 62 MiB at most: so every step or pass would fault in its activations again, which
    takes light ops on large tensors several times as long.
    """
    if device.type == "cpu" and sys.platform == "linux":
        set_option = getattr(ctypes.CDLL(None), "mallopt", None)
        if set_option is not None:
            set_option(_MMAP_THRESHOLD, _MAPPED_BYTES)
            set_option(_TRIM_THRESHOLD, _KEPT_BYTES)


def _index(device: torch.device) -> int:
    return torch.accelerator.current_device_index() if device.index is None else device.index
