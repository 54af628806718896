"""How much of a device's peak rates real kernels reach: a roofline, and its fit to measurements.

The peaks are left to ``devices``, the kernels to ``survey``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..hardware import Device
from .kernel_counts import Kernels

__all__ = ["Efficiency", "fit", "seconds"]


@dataclasses.dataclass(frozen=True, slots=True)
class Efficiency:
    """The reached share of a device's peaks, and how far off an estimate may be.

    Attributes
    ----------
    matrix: of FLOP/s, in matrix products, convolutions and attention. 0.6 is what large bf16 training
        runs report for their matrix products (PaLM, 46–57% of the whole step; GEMM benchmarks, 60–80%).
    convolution: the same in convolutions; None where they are as ``matrix``. May exceed one: FLOPs are
        those of the direct algorithm, and Winograd's needs fewer.
    matrix_memory: of memory bandwidth, in kernels with FLOPs, whose traffic then adds to their arithmetic;
        None for a roofline, in which the longer of the two counts.
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
    convolution: float | None = None
    matrix_memory: float | None = None

    def optimizer_s_per_byte(self, device: Device) -> float:
        """Seconds of an Adam step per parameter byte: reads of w, g, m, v and writes of w, m, v."""
        return 7 / (device.bandwidth_bytes_s * self.memory) if device.bandwidth_bytes_s else 0.0


def seconds(kernels: Kernels, device: Device, efficiency: Efficiency) -> float:
    """Time of some kernels: ``n·launch + work``, or where the device queues kernels the larger of the two.

    Work is ``matrix work + other_bytes/B``. Matrix work is the longer of its arithmetic and its traffic (a
    roofline) or, where the efficiency knows what traffic costs beside arithmetic, their sum. Where the host
    launches and works in turn, the sum of launch and work gives the saturating efficiency ``work / (work +
    half)`` that kernels show at small sizes; where it launches ahead, an op is bound by one or the other.
    """
    launch = device.launch_s if efficiency.launch_s is None else efficiency.launch_s
    peak, convolved = _rate(device, kernels.dtype), kernels.convolution_flops
    convolution = efficiency.matrix if efficiency.convolution is None else efficiency.convolution
    arithmetic = (kernels.flops - convolved) / (peak * efficiency.matrix) + convolved / (peak * convolution)
    moved = kernels.matrix_bytes / _bandwidth(device)
    if efficiency.matrix_memory is None:
        matrix = max(arithmetic, moved / efficiency.memory)
    else:
        matrix = arithmetic + moved / efficiency.matrix_memory
    other = (kernels.bytes - kernels.matrix_bytes) / _bandwidth(device)
    launching, working = kernels.n * launch, matrix + other / efficiency.memory
    return max(launching, working) if device.launches_ahead else launching + working


def fit(measured: Sequence[tuple[Kernels, float]], device: Device, source: str = "") -> Efficiency:
    """The efficiency under which estimates come nearest to measured seconds.

    Least squares with non-negative rates (Lawson and Hanson) on
    ``seconds ≈ n·launch + flops/(F·e) + matrix_bytes/(B·e) + other_bytes/(B·e)``, convolutions with an
    efficiency of their own, each row divided by the root of its seconds: between relative errors, which
    light ops would rule, and absolute ones. What the measurements say nothing about stays as assumed.
    ``spread`` is the 68th percentile of the relative errors, and no less than assumed for so few ops that
    any would fit.
    """
    rows = [(k, s) for k, s in measured if s > 0 and k.n]
    if not rows:
        return Efficiency()
    table = np.array([_work(k, device) for k, _ in rows])
    weights = 1 / np.sqrt([s for _, s in rows])
    costs = _solved(table, weights, device.launches_ahead).tolist()
    matrix, convolution, _, memory = (1 / c if c else None for c in costs[1:])
    traffic = 1 / costs[3] if costs[3] else math.inf
    found = Efficiency(
        matrix=matrix or convolution or Efficiency().matrix,
        memory=memory or Efficiency().memory,
        launch_s=costs[0] * 1e-6,
        source=source or f"fitted to {len(rows)} measured ops",
        convolution=convolution,
        matrix_memory=traffic if table[:, 3].any() else None,
    )
    errors = [abs(seconds(k, device, found) / s - 1) for k, s in rows]
    known = float(np.quantile(errors, 0.68))
    return dataclasses.replace(found, spread=known if len(rows) >= _ENOUGH else max(known, found.spread))


def _solved(table: Any, weights: Any, launches_ahead: bool) -> Any:
    """Non-negative seconds per unit of each column; the first is launches, the others work.

    Where kernels are queued, a row is bound by its launches or by its work: which one is settled by turns
    with the fit, until it stays.
    """
    from scipy.optimize import nnls  # takes long to import

    bound = np.ones_like(table)
    costs = nnls(table * weights[:, None], 1 / weights)[0]
    for _ in range(_ROUNDS if launches_ahead else 0):
        by_launch = table[:, 0] * costs[0] > table[:, 1:] @ costs[1:]
        now = np.ones_like(table)
        now[by_launch, 1:], now[~by_launch, 0] = 0.0, 0.0
        if (now == bound).all():
            break
        bound = now
        costs = nnls(table * bound * weights[:, None], 1 / weights)[0]
    return costs


_ROUNDS = 20
_ENOUGH = 10
"""Measured ops, two for each of the five figures, from which the errors of a fit tell something."""


def _work(kernels: Kernels, device: Device) -> tuple[float, ...]:
    """Seconds at the device's peaks: launches in µs, products, convolutions, their traffic, the rest's."""
    peak, bandwidth = _rate(device, kernels.dtype), _bandwidth(device)
    return (
        kernels.n * 1e-6,
        (kernels.flops - kernels.convolution_flops) / peak,
        kernels.convolution_flops / peak,
        kernels.matrix_bytes / bandwidth,
        (kernels.bytes - kernels.matrix_bytes) / bandwidth,
    )


def _rate(device: Device, dtype: str) -> float:
    """Peak FLOP/s of a dtype; the device's slowest where it says nothing of it."""
    if dtype in device.flops_s:
        return device.flops_s[dtype]
    return min(device.flops_s.values(), default=float("inf"))


def _bandwidth(device: Device) -> float:
    return device.bandwidth_bytes_s or float("inf")
