"""Times pieces of code on a device: host clock on CPU, events in the stream on an accelerator.

What to time, and how often, is left to ``profiler``.
"""

from __future__ import annotations

import functools
import math
import statistics
import subprocess
import time
from collections.abc import Hashable, Sequence
from types import TracebackType
from typing import Any

import torch

from .. import accelerator

__all__ = ["Busy", "Stopwatch", "device_name", "device_settings", "spread"]

_LEAST_SIDE, _MOST_SIDE = 128, 8192
_ONCE_S = 5e-4
"""How large a matrix product is by which a device is kept busy, and what one takes at least."""
_LONGEST_S = 2.0


class Stopwatch:
    """Seconds by key: ``with watch("key"): ...``, then :meth:`read`.

    On an accelerator the code is bracketed by events in the current stream, so launches overlap with work as
    they do in training; nothing waits until :meth:`read`. Elsewhere the host's clock is read. ``host_s`` has
    what the host took since the last read, by key. Where that is the longer the events tell how long the
    device waited for it, unless it was kept :class:`Busy`.
    """

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        self._is_async = accelerator.is_async(self.device)
        self._marks: list[tuple[Hashable, Any, Any]] = []
        self.host_s: dict[Hashable, float] = {}
        self._taken: dict[Hashable, float] = {}
        self._key: Hashable = None
        self._start: Any = None

    def __call__(self, key: Hashable) -> Stopwatch:
        self._key = key
        return self

    def __enter__(self) -> Stopwatch:
        self._start, self._start_s = self._now(), time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        taken = time.perf_counter() - self._start_s
        self._taken[self._key] = self._taken.get(self._key, 0.0) + taken
        self._marks.append((self._key, self._start, self._now()))

    def _now(self) -> Any:
        return accelerator.mark(self.device) if self._is_async else time.perf_counter()

    def read(self) -> dict[Hashable, float]:
        """Seconds of each key since the last read; a key timed twice gives the sum."""
        accelerator.synchronize(self.device)
        out: dict[Hashable, float] = {}
        for key, start, end in self._marks:
            seconds = accelerator.seconds(start, end) if self._is_async else end - start
            out[key] = out.get(key, 0.0) + seconds
        self._marks.clear()
        self.host_s, self._taken = self._taken, {}
        return out


class Busy:
    """Work that an accelerator is given ahead of what is timed, so that it need not wait for the host.

    Events then tell the device's own seconds, however long the host takes to launch it all. Few kernels that
    take long each, since a host that has launched about a thousand waits for room.
    """

    def __init__(self, device: torch.device) -> None:
        self._watch, self._once_s = Stopwatch(device), 0.0
        side = _LEAST_SIDE if accelerator.is_async(device) else _MOST_SIDE + 1
        while side <= _MOST_SIDE and self._once_s < _ONCE_S:
            self._given = torch.zeros(side, side, device=device)
            self._made = torch.empty_like(self._given)
            self._once_s = min(self._timed() for _ in range(3))
            side *= 2

    def _timed(self) -> float:
        with self._watch("once"):
            torch.mm(self._given, self._given, out=self._made)
        return self._watch.read()["once"]

    def keep(self, seconds: float) -> None:
        """Give an accelerator work for at least so long, up to some seconds; nobody waits."""
        for _ in range(math.ceil(min(seconds, _LONGEST_S) / self._once_s) if self._once_s else 0):
            torch.mm(self._given, self._given, out=self._made)


def spread(samples: Sequence[float]) -> float:
    """Half the distance between the quartiles, relative to the median; 0 for fewer than three samples.

    >>> spread([1.0, 1.0, 1.1, 1.2, 1.2])
    0.09090909090909088
    """
    if len(samples) < 3 or statistics.median(samples) == 0:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / 2 / middle


def device_name(device: torch.device | str) -> str:
    """What costs are kept under: the accelerator's own name, or the processor's and the threads used."""
    device = torch.device(device)
    if device.type == "cpu":
        n = torch.get_num_threads()
        return f"{_processor()}, {n} thread{'s' * (n > 1)}"
    return accelerator.name(device)


def device_settings(device: torch.device | str) -> dict[str, Any]:
    """What seconds hang on beside the device itself: precision of products, libraries' flags, driver, power.

    Part of the key that a measurement is kept under, so that one taken otherwise is taken anew.
    """
    device = torch.device(device)
    attention = ("flash", "mem_efficient", "math", "cudnn")
    out: dict[str, Any] = {
        "fp32": _fp32_precisions(),
        "attention": [kind for kind in attention if getattr(torch.backends.cuda, f"{kind}_sdp_enabled")()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type == "cpu":
        out["mkldnn"] = torch.backends.mkldnn.enabled
    if device.type == "cuda":
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        flags = ("enabled", "benchmark", "deterministic")
        out |= {f"cudnn.{flag}": getattr(cudnn, flag) for flag in flags} | {"cudnn": cudnn.version()}
        kinds = ("fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction", "fp16_accumulation")
        out |= {kind: getattr(matmul, f"allow_{kind}") for kind in kinds}
        out["driver"] = _driver(str(torch.cuda.get_device_properties(device).uuid))
    return out


def _fp32_precisions() -> dict[str, str]:
    """What fp32 is computed in, by library and kind of op.

    torch's older switches set the same, but cannot be read once somebody used these.
    """
    libraries = {"cuda": ("matmul",), "cudnn": ("conv", "rnn"), "mkldnn": ("matmul", "conv", "rnn")}
    found = {
        f"{library}.{kind}": getattr(getattr(torch.backends, library), kind).fp32_precision
        for library, kinds in libraries.items()
        for kind in kinds
    }
    return {place: value.replace("none", "ieee") for place, value in found.items()}


@functools.cache
def _driver(uuid: str) -> str:
    """A GPU's driver version and power limit as nvidia-smi tells them; "" where it does not."""
    command = ["nvidia-smi", "--query-gpu=uuid,driver_version,power.limit", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return next((line.partition(", ")[2] for line in done.stdout.splitlines() if uuid in line), "")


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:  # noqa: PTH123 - a stream of which one line is read
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        return "CPU"
    return "CPU"
