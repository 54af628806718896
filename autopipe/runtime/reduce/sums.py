"""Gradients of many parameters as one flat message: laid out, summed by whoever is asked, put back.

Who sums them, and when, is left to ``ties`` and ``buckets``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ...accelerator import upload

__all__ = ["Flat", "by_dtype", "local", "sum_gradients"]


class Flat:
    """Gradients of one dtype in a row, after a number for each that says whether there is one.

    ``numbers`` is what has to be summed over all holders, real also for complex gradients.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], scale: float = 1.0) -> None:
        self._parameters = parameters
        held = [p.grad for p in parameters]
        self._parts = [
            local(torch.zeros_like(p) if g is None else g) for p, g in zip(parameters, held, strict=True)
        ]
        self._is_whole = all(grad is not None for grad in held)
        first = _real(self._parts[0])
        has = torch.ones(len(held), dtype=first.dtype, device=first.device)
        if not self._is_whole:
            has = upload(
                torch.tensor([g is not None for g in held], dtype=first.dtype, device="cpu"), first.device
            )
        self.numbers = torch.cat([has, *(_real(part).reshape(-1) for part in self._parts)])
        if scale != 1.0:
            self.numbers.mul_(scale)

    @torch.no_grad()
    def put_back(self) -> None:
        """Make the sums the gradients; a parameter that had none anywhere keeps none."""
        n = len(self._parts)
        # a gradient of another holder alone: who lacks one has to look, and waits
        anywhere = [True] * n if self._is_whole else (self.numbers[:n] > 0).tolist()
        pieces = self.numbers[n:].split([_real(part).numel() for part in self._parts])
        for parameter, part, piece, some in zip(self._parameters, self._parts, pieces, anywhere, strict=True):
            if some:
                _real(part).copy_(piece.view_as(_real(part)))
                if parameter.grad is None or parameter.grad.layout is not torch.strided:
                    parameter.grad = _like(parameter, part)


def by_dtype(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters that one message can hold, together."""
    found: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.dtype, []).append(parameter)
    return list(found.values())


def sum_gradients(parameters: Sequence[nn.Parameter], all_reduce: Callable[[Tensor], object]) -> None:
    """Sum gradients over all callers; one with no gradient anywhere keeps none. One message per dtype."""
    for same in by_dtype(parameters):
        flat = Flat(same)
        all_reduce(flat.numbers)
        flat.put_back()


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor itself, dense."""
    if hasattr(tensor, "to_local"):
        return tensor.to_local()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _like(parameter: Tensor, part: Tensor) -> Tensor:
    if not hasattr(parameter, "to_local"):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, parameter.device_mesh, parameter.placements, run_check=False)  # type: ignore[attr-defined]
