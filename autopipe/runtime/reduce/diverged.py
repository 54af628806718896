"""Whether ranks that hold copies of a parameter still have equal values of it, up to rounding.

Which ranks those are, and when to look, is left to whoever asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ...accelerator import Later
from .sums import local

__all__ = ["Diverged"]

STEP = 31
"""Beside the sum of all values that of each 31st: what is trained may be such that all sum to nothing, as the
gradients of a cross entropy do over labels, and those of what follows a norm over features."""
SAME = 1e-3
"""How far apart sums of copies may be, relative to their norm: other values are about 1 apart."""


class Diverged:
    """Parameters whose copies differ, found out by comparing their sums.

    On an accelerator what was compared is known a step or so later: nothing waits for it.
    """

    def __init__(self) -> None:
        self._looked: list[tuple[str, Sequence[str], Later]] = []

    @torch.no_grad()
    def look(
        self,
        where: str,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        largest: Callable[[Tensor], object],
    ) -> None:
        """Compare copies: ``largest`` puts the largest over their holders, ``where`` in words, in place.

        Of no parameters nothing is compared, as of a stage that is frozen.
        """
        if not parameters:
            return
        values = [local(p) for p in parameters]
        values = [torch.view_as_real(v) if v.is_complex() else v for v in values]
        values = [part for v in values for part in (v, v.reshape(-1)[::STEP])]
        names = [name for name in names for _ in range(2)]
        sums = torch.stack([v.sum(dtype=torch.float64) for v in values])
        norms = [torch.linalg.vector_norm(v, dtype=torch.float64) for v in values]
        ends = torch.cat([sums, -sums])
        largest(ends)
        apart = (ends[: len(sums)] + ends[len(sums) :]) > SAME * torch.stack(norms)
        self._looked.append((where, names, Later(apart)))

    def told(self) -> tuple[str, list[str]] | None:
        """Where copies differ, and which: the first of what has come."""
        while self._looked and self._looked[0][2].has_come():
            where, names, apart = self._looked.pop(0)
            differing = dict.fromkeys(n for n, differs in zip(names, apart.read(), strict=True) if differs)
            if differing:
                return where, [*differing]
        return None
