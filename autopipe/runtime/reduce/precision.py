"""Mixed precision and gradient norms over a whole pipeline: autocast, an agreed overflow, clipping.

Scaling the loss and stepping the optimizer stay with the user's own ``GradScaler`` and optimizer.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from ...arguments import brief
from ...errors import InputError, StepError
from ...torch_private import foreach_norm
from ..options import Autocast
from ..wire.group import Group

__all__ = ["autocast_context", "clip_grad_norm", "placeholder", "spread_overflow"]


def autocast_context(
    autocast: Autocast, device: torch.device
) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A factory of the context each forward runs in: a dtype, a factory of the user's, or nothing.

    What it makes raises :class:`InputError` where the user's factory gives no context.
    """
    if autocast is None:
        return contextlib.nullcontext
    if isinstance(autocast, torch.dtype):
        dtype = autocast
        return lambda: torch.autocast(device.type, dtype=dtype)
    return functools.partial(_made, autocast)


def _made(factory: Callable[[], Any]) -> contextlib.AbstractContextManager[Any]:
    made = factory()
    if not isinstance(made, contextlib.AbstractContextManager):
        raise InputError(
            f"autocast made {brief(made)}, which is no context; give a dtype, or a function that returns "
            "one, such as lambda: torch.autocast('cpu')"
        )
    return made


def spread_overflow(parameters: Iterable[nn.Parameter], group: Group, device: torch.device) -> None:
    """Where a gradient of any rank overflowed, let none of any rank be finite.

    A ``GradScaler`` looks at those of its own rank and of one optimizer; this way all of them skip the same
    step and shrink their scales alike. Nothing waits for the device.
    """
    grads = [local_values(p.grad) for p in parameters if p.grad is not None]
    flag = torch.zeros((), device=device)
    for norm in foreach_norms(grads, math.inf):
        flag = torch.maximum(flag, (~torch.isfinite(norm)).to(flag))
    group.all_reduce(flag, ReduceOp.MAX)
    if device.type == "cpu" and not flag:
        return
    for grad in grads:
        view = grad.view(-1)[:1] if grad.is_contiguous() else grad[(slice(0, 1),) * grad.ndim]
        view.copy_(torch.where(flag > 0, torch.full_like(view, math.inf), view))


def placeholder(device: torch.device) -> nn.Parameter:
    """One number that never changes: for an optimizer of a rank without parameters, and for a scaler.

    torch's optimizers refuse an empty list, and a ``GradScaler`` an optimizer without any gradient. It says
    what it is by an attribute: of another class, optimizers would leave their fast path for all.
    """
    made = nn.Parameter(torch.zeros(1, device=device))
    made.is_placeholder = True  # type: ignore[attr-defined]
    return made


def clip_grad_norm(
    parameters: Sequence[nn.Parameter],
    counted: Sequence[nn.Parameter],
    max_norm: float,
    *,
    norm_type: float,
    error_if_nonfinite: bool,
    group: Group | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Scale all gradients so that their norm over every rank is at most ``max_norm``; the norm before.

    ``counted`` are those of ``parameters`` whose norm this rank contributes: a tied one counts on one rank
    only. Each gradient's norm is in fp32 or wider, their sum in fp64, and what is returned in ``dtype``.
    """
    norms = [n.to(device) for n in foreach_norms([p.grad for p in counted if p.grad is not None], norm_type)]
    # fp64 even where all here is fp32: ranks may differ in their widest dtype
    own = (torch.stack(norms) if norms else torch.zeros(1, device=device)).double()
    infinite = norm_type == math.inf
    total = own.max() if infinite else (own**norm_type).sum()
    if group is not None:
        group.all_reduce(total, ReduceOp.MAX if infinite else ReduceOp.SUM)
    if not infinite:
        total = total ** (1.0 / norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise StepError(
            f"the gradients' norm of order {norm_type} over all stages is {total.item()}, so they cannot be "
            "clipped; pass error_if_nonfinite=False to scale them anyway"
        )
    nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total.to(dtype)


def foreach_norms(grads: Sequence[Tensor], order: float) -> list[Tensor]:
    """Each gradient's norm in fp32 or wider, all of a kind at once: torch's own keeps to half precision."""
    norms: list[Tensor] = []
    for same in _alike(grads):
        wide = torch.promote_types(same[0].dtype, torch.float32)
        if _is_plain(same[0]) and not same[0].is_complex():
            norms += foreach_norm(same, order, dtype=wide)
        else:
            norms += [_norm(grad, order, wide) for grad in same]
    return norms


def _alike(grads: Sequence[Tensor]) -> list[list[Tensor]]:
    """Gradients that one call can take, together."""
    kinds: dict[tuple[Any, ...], list[Tensor]] = {}
    for grad in grads:
        if grad.numel():
            kinds.setdefault((grad.dtype, grad.device, type(grad), grad.layout), []).append(grad)
    return list(kinds.values())


def _is_plain(grad: Tensor) -> bool:
    return grad.layout is torch.strided and not hasattr(grad, "to_local")


def _norm(grad: Tensor, order: float, dtype: torch.dtype) -> Tensor:
    if grad.layout is torch.sparse_coo:
        grad = grad.coalesce().values()
    norm = torch.linalg.vector_norm(grad, order, dtype=dtype)
    # of a DTensor: over all its shards
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def local_values(grad: Tensor) -> Tensor:
    """The numbers of a gradient that are on this rank."""
    grad = grad.to_local() if hasattr(grad, "to_local") else grad
    return grad.coalesce().values() if grad.layout is torch.sparse_coo else grad
