"""How people train, as bytes: what a parameter takes in each precision and under each optimizer.

What that means for a plan is left to ``memory`` and ``solve``; the optimizer itself is always the user's.

==============  ======  ========  ======  =================================================================
precision       weight  gradient  master  source
==============  ======  ========  ======  =================================================================
``fp32``        4       4         –       torch's default
``bf16-mixed``  2       4         4       Megatron-LM: gradients accumulated in fp32, 18 bytes with Adam
                                          (ZeRO, Rajbhandari et al. 2020, keeps 2-byte gradients: 16)
``bf16``        2       2         –       parameters, gradients and moments in bf16 alone
``fp8``         1       4         4       fp8 copies of the weights, an fp32 master (DeepSeek-V3, 2024)
==============  ======  ========  ======  =================================================================

Optimizer state is in fp32, in pure ``bf16`` in bf16: two moments for Adam, one for SGD with momentum and for
Muon's matrices (Jordan 2024; what is no matrix is Adam's, embeddings count as matrices, which errs low), none
for SGD; one byte each and fp32 scales per 256 values for 8-bit Adam (Dettmers et al. 2022).
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from .errors import InputError
from .graph import OpGraph, ParameterSpec
from .units import dtype_bytes

__all__ = [
    "ADAM",
    "OFFLOADS",
    "OPTIMIZERS",
    "PRECISIONS",
    "Offload",
    "Optimizer",
    "Precision",
    "bytes_per_parameter",
    "optimizer_ratio_of",
    "own_bytes",
    "wants_autocast",
]

Precision = Literal["fp32", "bf16-mixed", "bf16", "fp8"]
Optimizer = Literal["adam", "sgd", "sgd-momentum", "muon", "adam-8bit"]
Offload = Literal["never", "optimizer", "activations", "all"]

ADAM = 2.0
"""Optimizer bytes per parameter byte of Adam in the parameters' own dtype: two moments."""
PRECISIONS: tuple[str, ...] = get_args(Precision)
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)
OFFLOADS: tuple[str, ...] = get_args(Offload)

_PARTS = {"fp32": (4, 4, 0), "bf16-mixed": (2, 4, 4), "bf16": (2, 2, 0), "fp8": (1, 4, 4)}
_EIGHT_BIT = 1 + 4 / 256
_OWN = {"fp32": 4, "bf16": 2}
"""Bytes that the model's own parameters have where nothing else holds the weights."""


@dataclasses.dataclass(frozen=True, slots=True)
class BytesPerParameter:
    """Bytes that one trained parameter takes on its device, by what holds them."""

    weight: float
    gradient: float
    master: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weight + self.gradient + self.master + self.optimizer


def bytes_per_parameter(
    precision: str, optimizer: str, *, is_matrix: bool = True, offload: str = "never"
) -> BytesPerParameter:
    """What a parameter takes; with ``offload`` ``"optimizer"`` or ``"all"`` master and state are the host's.

    >>> bytes_per_parameter("bf16-mixed", "adam").total, bytes_per_parameter("fp32", "sgd").total
    (18.0, 8.0)
    >>> bytes_per_parameter("bf16", "adam").total
    8.0
    """
    weight, gradient, master = _PARTS[precision]
    moment = 2.0 if precision == "bf16" else 4.0
    n_moments = {"adam": 2, "sgd": 0, "sgd-momentum": 1, "muon": 1 if is_matrix else 2, "adam-8bit": 2}[
        optimizer
    ]
    state = n_moments * (_EIGHT_BIT if optimizer == "adam-8bit" else moment)
    if offload in ("optimizer", "all"):
        master, state = 0, 0.0
    return BytesPerParameter(weight, gradient, master, state)


def optimizer_ratio_of(graph: OpGraph, precision: str | None, optimizer: str, offload: str) -> float:
    """Bytes beside weights and gradients, per byte of the model's trained parameters as they are.

    Below 0 where less is on the device than these are: of an fp32 model trained in bf16, whose master weights
    and optimizer state are the host's. ``precision`` None takes the parameters for what they are: ``fp32``
    or, in half precision, ``bf16``.

    Raises :class:`InputError` where the model's parameters are not what the precision starts from.
    """
    trained = [p for p in graph.parameters if p.requires_grad and not p.is_buffer and p.numel]
    own = sum(p.bytes for p in trained)
    if not own:
        return 0.0
    if precision in _OWN:
        _check_own(trained, precision)
    wanted = 0.0
    for p in trained:
        of = precision or ("fp32" if dtype_bytes(p.dtype) >= 4 else "bf16")
        wanted += (
            p.numel * bytes_per_parameter(of, optimizer, is_matrix=len(p.shape) > 1, offload=offload).total
        )
    return wanted / own - 2


def own_bytes(graph: OpGraph) -> float:
    """Bytes of a trained parameter as the model has it, in the mean."""
    trained = [p for p in graph.parameters if p.requires_grad and not p.is_buffer]
    return sum(p.bytes for p in trained) / max(1, sum(p.numel for p in trained)) or 4.0


def wants_autocast(graph: OpGraph, precision: str | None) -> bool:
    """Whether the model's parameters are fp32 and its forward would run in bf16 under autocast."""
    is_full = any(dtype_bytes(p.dtype) >= 4 for p in graph.parameters if p.requires_grad)
    return precision in ("bf16-mixed", "fp8") and is_full


def _check_own(trained: list[ParameterSpec], precision: str) -> None:
    odd = next((p for p in trained if dtype_bytes(p.dtype) != _OWN[precision]), None)
    if odd is not None:
        cast = "model.bfloat16()" if precision == "bf16" else "model.float()"
        raise InputError(
            f"precision is {precision!r}, but the parameter {odd.name} is {odd.dtype}; call {cast} first, or "
            "use 'bf16-mixed'"
        )
