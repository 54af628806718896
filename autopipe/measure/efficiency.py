"""How much of a device's peak rates real kernels reach: a roofline, and its fit to measurements.

The peaks are left to ``devices``, the kernels to ``survey``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import scipy.optimize

from ..hardware import Device
from .account import Kernels

__all__ = ["Efficiency", "fit", "seconds"]


@dataclasses.dataclass(frozen=True, slots=True)
class Efficiency:
    """The reached share of a device's peaks, and how far off an estimate may be.

    Attributes
    ----------
    matrix: of FLOP/s, in matrix products, convolutions and attention. 0.6 is what large bf16 training
        runs report for their matrix products (PaLM, 46–57% of the whole step; GEMM benchmarks, 60–80%).
    memory: of memory bandwidth. 0.8 is what STREAM-like kernels reach on the accelerators described.
    launch_s: seconds per kernel; None for the device's own.
    spread: relative half-width of the interval that two thirds of ops fall in.
    source: what it was fitted to, or "assumed".
    """

    matrix: float = 0.6
    memory: float = 0.8
    launch_s: float | None = None
    spread: float = 0.5
    source: str = "assumed"

    def optimizer_s_per_byte(self, device: Device) -> float:
        """Seconds of an Adam step per parameter byte: reads of w, g, m, v and writes of w, m, v."""
        return 7 / (device.bandwidth_bytes_s * self.memory) if device.bandwidth_bytes_s else 0.0


def seconds(kernels: Kernels, device: Device, efficiency: Efficiency) -> float:
    """Roofline time of some kernels.

    Matrix kernels take the longer of their arithmetic and their traffic, the others their traffic, and no
    kernel less than a launch: ``n·launch + max(flops/F, matrix_bytes/B) + other_bytes/B``. The sum, rather
    than the maximum, of launch and work gives the saturating efficiency ``work / (work + half)`` that
    kernels show at small sizes.
    """
    launch = device.launch_s if efficiency.launch_s is None else efficiency.launch_s
    flops_s = _rate(device, kernels.dtype) * efficiency.matrix
    bytes_s = device.bandwidth_bytes_s * efficiency.memory or float("inf")
    other = kernels.bytes - kernels.matrix_bytes
    return kernels.n * launch + max(kernels.flops / flops_s, kernels.matrix_bytes / bytes_s) + other / bytes_s


def fit(measured: Sequence[tuple[Kernels, float]], device: Device, source: str = "") -> Efficiency:
    """The efficiency under which the roofline comes nearest to measured seconds, in relative terms.

    Least squares with non-negative rates (Lawson and Hanson) on
    ``seconds ≈ n·launch + flops/(F·matrix) + other_bytes/(B·memory)``, each row divided by its seconds.
    What the measurements say nothing about stays as assumed. ``spread`` is the 68th percentile of the
    relative errors.
    """
    rows = [(k, s) for k, s in measured if s > 0 and k.n]
    if not rows:
        return Efficiency()
    table = np.array(
        [
            (k.n * 1e-6, k.flops / _rate(device, k.dtype), (k.bytes - k.matrix_bytes) / _bandwidth(device))
            for k, _ in rows
        ]
    )
    times = np.array([s for _, s in rows])
    launch, matrix, memory = scipy.optimize.nnls(table / times[:, None], np.ones(len(rows)))[0]
    found = Efficiency(
        matrix=1 / matrix if matrix else Efficiency().matrix,
        memory=1 / memory if memory else Efficiency().memory,
        launch_s=launch * 1e-6,
        source=source or f"fitted to {len(rows)} measured ops",
    )
    errors = [abs(seconds(k, device, found) / s - 1) for k, s in rows]
    return dataclasses.replace(found, spread=float(np.quantile(errors, 0.68)))


def _rate(device: Device, dtype: str) -> float:
    """Peak FLOP/s of a dtype; the device's slowest where it says nothing of it."""
    if dtype in device.flops_s:
        return device.flops_s[dtype]
    return min(device.flops_s.values(), default=float("inf"))


def _bandwidth(device: Device) -> float:
    return device.bandwidth_bytes_s or float("inf")
