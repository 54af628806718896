"""The most memory that this process's stages held: as the accelerator's allocator or the host's system says.

What it is held against is left to ``simulator``.
"""

from __future__ import annotations

import ctypes
import pathlib
import re
from collections.abc import Sequence

import torch

from .. import accelerator
from ..measure.kernel_counts import storage_bytes
from ..stages import Stage

__all__ = ["PeakMemory", "resident_bytes"]

_STATUS, _CLEAR = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")


class PeakMemory:
    """The most held since it was made, what the stages' own weights took before included.

    On a host that is by how much the process grew: right to some MiB, which Python and torch take beside
    tensors, and only where the system (Linux) tells a process its peak; elsewhere unknown.
    """

    def __init__(self, device: torch.device, stages: Sequence[Stage]) -> None:
        self._device, self._is_host = device, device.type == "cpu"
        self._base: int | None = None
        if not self._is_host:
            accelerator.reset_peak(device)
            return
        _give_back()
        try:
            _CLEAR.write_text("5")  # the system's peak begins anew
            self._base = resident_bytes("VmRSS") - _weights(stages)
        except OSError:
            self._base = None

    def peak_bytes(self) -> int | None:
        """The most held; None where nobody says."""
        if not self._is_host:
            return accelerator.peak_bytes(self._device)
        return None if self._base is None else max(0, resident_bytes("VmHWM") - self._base)


def resident_bytes(name: str) -> int:
    """What Linux says of this process's memory: a line of ``/proc/self/status``, such as ``VmRSS``."""
    found = re.search(rf"{name}:\s+(\d+) kB", _STATUS.read_text())
    if found is None:
        raise OSError(f"the system does not tell {name}")
    return int(found[1]) << 10


def _weights(stages: Sequence[Stage]) -> int:
    """Bytes of the stages' parameters and buffers that are there already."""
    tensors = (t for stage in stages for t in (*stage.parameters(), *stage.buffers()))
    return sum(storage_bytes(t for t in tensors if not t.is_meta).values())


def _give_back() -> None:
    """Have the C allocator return what it keeps, where it can: later growth would hide in that."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
