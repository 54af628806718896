"""Mixed precision and gradient norms over a whole pipeline: autocast, an agreed overflow, clipping.

Scaling the loss and stepping the optimizer stay with the user's own ``GradScaler`` and optimizer.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from ...errors import StepError
from ..wire.group import Group

__all__ = ["autocast_context", "clip_grad_norm", "spread_overflow"]

Autocast = torch.dtype | Callable[[], contextlib.AbstractContextManager[Any]] | None


def autocast_context(
    autocast: Autocast, device: torch.device
) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A factory of the context each forward runs in: a dtype, a factory of the user's, or nothing."""
    if autocast is None:
        return contextlib.nullcontext
    if isinstance(autocast, torch.dtype):
        dtype = autocast
        return lambda: torch.autocast(device.type, dtype=dtype)
    return autocast


def spread_overflow(parameters: Iterable[nn.Parameter], group: Group | None, device: torch.device) -> None:
    """Where a gradient of any rank overflowed, make one of every rank's infinite.

    A ``GradScaler`` looks at its own rank only; this way all of them skip the same step and shrink their
    scales alike. Nothing waits for the device.
    """
    grads = [_local(p.grad) for p in parameters if p.grad is not None]
    grads = [g.coalesce().values() if g.layout is torch.sparse_coo else g for g in grads]
    flag = torch.zeros((), device=device)
    for grad in grads:
        flag = torch.maximum(flag, (~torch.isfinite(grad).all()).to(flag))
    if group is None:
        return
    group.all_reduce(flag, ReduceOp.MAX)
    first = next((g for g in grads if g.numel()), None)
    if first is not None:
        view = first.view(-1)[:1] if first.is_contiguous() else first[(slice(0, 1),) * first.ndim]
        view.copy_(torch.where(flag > 0, torch.full_like(view, math.inf), view))


def clip_grad_norm(
    parameters: Sequence[nn.Parameter],
    counted: Sequence[nn.Parameter],
    max_norm: float,
    *,
    norm_type: float,
    error_if_nonfinite: bool,
    group: Group | None,
    device: torch.device,
) -> Tensor:
    """Scale all gradients so that their norm over every rank is at most ``max_norm``; the norm before.

    ``counted`` are those of ``parameters`` whose norm this rank contributes: a tied one counts on one rank
    only. Sums are in fp32 or wider.
    """
    norms = [_norm(p.grad, norm_type).to(device) for p in counted if p.grad is not None]
    wide = torch.float64 if any(n.dtype is torch.float64 for n in norms) else torch.float32
    own = torch.stack([n.to(wide) for n in norms]) if norms else torch.zeros(1, device=device, dtype=wide)
    infinite = norm_type == math.inf
    # fp64 on the wire: ranks may differ in their widest dtype
    total = (own.max() if infinite else (own**norm_type).sum()).double()
    if group is not None:
        group.all_reduce(total, ReduceOp.MAX if infinite else ReduceOp.SUM)
    if not infinite:
        total = total ** (1.0 / norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise StepError(
            f"the gradients' norm of order {norm_type} over all stages is {total.item()}, so they cannot be "
            "clipped; pass error_if_nonfinite=False to scale them anyway"
        )
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(scale.to(p.grad.dtype).to(p.grad.device))
    return total.to(wide)


def _norm(grad: Tensor, norm_type: float) -> Tensor:
    if grad.layout is torch.sparse_coo:
        grad = grad.coalesce().values()
    norm = torch.linalg.vector_norm(grad, norm_type, dtype=torch.promote_types(grad.dtype, torch.float32))
    # of a DTensor: over all its shards
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
