"""Other data of the kind an example is: ints from its own values, floats in its own range, masks varied.

What is compared on them is left to ``referee``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..inputs.contents import is_whole
from ..inputs.layout import lying_as

__all__ = ["redrawn"]


def redrawn(given: Mapping[str, Tensor], seed: int) -> Iterator[dict[str, Tensor]]:
    """``given`` with other values, the most telling choice first: all of it; then what holds floats alone.

    A model may take ints only in a certain relation, as a text that holds one token for each patch.
    """
    generator = torch.Generator().manual_seed(seed)
    floats = {n: _redraw(t, generator) for n, t in given.items() if not is_whole(t)}
    others = {n: _redraw(t, generator) for n, t in given.items() if n not in floats}
    if others:
        yield {n: (floats | others)[n] for n in given}
    if floats:
        yield {**given, **floats}


def _redraw(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Values drawn from a tensor's own; floats each shrunk by up to a half, so that no sum stays."""
    if not tensor.numel() or tensor.layout is not torch.strided:
        return tensor
    flat = tensor.detach().cpu().flatten()
    if _is_mask(flat):
        new = _masked(tensor.detach().cpu())
    else:
        new = flat[torch.randint(flat.numel(), flat.shape, generator=generator, device="cpu")].view(
            tensor.shape
        )
        if not is_whole(tensor):
            new = new * (0.5 + 0.5 * torch.rand(new.shape, generator=generator, device="cpu")).to(new.dtype)
        elif tensor.dim() and _is_sorted(tensor):
            new = new.long().sort(-1).values.to(new.dtype)
    return lying_as(new.to(tensor.device), tensor).requires_grad_(tensor.requires_grad)


def _is_mask(flat: Tensor) -> bool:
    return flat.dtype is torch.bool or (not flat.is_complex() and bool(((flat == 0) | (flat == 1)).all()))


def _masked(tensor: Tensor) -> Tensor:
    """A mask with one more row cut short: its last element is the first row's first one's opposite."""
    new = tensor.clone(memory_format=torch.contiguous_format)
    if tensor.dim() > 1:
        new[-1].view(-1)[-1:] = 0
    return new


def _is_sorted(tensor: Tensor) -> bool:
    return tensor.shape[-1] > 1 and bool((tensor.long().diff(dim=-1) >= 0).all())
