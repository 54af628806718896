"""Gradients of a batch's own tensors: each stage's share, summed over ranks.

Making the leaves that gather them is left to ``worker``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .microbatch import Batch

__all__ = ["backpropagate", "tracked"]

Leaves = Mapping[str, Sequence[Tensor]]
"""Input name → the leaf of each microbatch."""


def tracked(values: Mapping[str, object]) -> dict[str, Tensor]:
    """The inputs that require a gradient."""
    return {n: v for n, v in values.items() if isinstance(v, Tensor) and v.requires_grad}


def backpropagate(
    inputs: Mapping[str, Tensor],
    stages: Iterable[Leaves],
    batch: Batch,
    device: torch.device,
    sum_over_ranks: Callable[[Tensor], object] | None,
) -> None:
    """Give ``inputs`` the gradients that the leaves of this rank's ``stages`` and of other ranks' gathered.

    They go on from there as in any backward: into ``grad`` of a leaf, through the graph of what is none.
    """
    held = list(stages)
    grads = []
    for name, value in inputs.items():
        total = torch.zeros(value.shape, dtype=value.dtype, device=device)
        for leaves in held:
            if name in leaves:
                total += _joined(leaves[name], name, batch)
        if sum_over_ranks is not None:
            sum_over_ranks(total)
        grads.append(total.to(value.device))
    if grads:
        torch.autograd.backward(list(inputs.values()), grads)


def _joined(leaves: Sequence[Tensor], name: str, batch: Batch) -> Tensor:
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    if name in batch.axes or name in batch.packed:
        return torch.cat(grads, batch.axes.get(name, 0))
    return torch.stack(grads).sum(0)
