"""Whether the optimizers of some ranks were stepped or zeroed between two steps, and others' were not.

So it is where user code skips a step by what it sees of gradients: each rank sees its own.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable

from torch import nn

from ...torch_private import UnseenByFunctions

__all__ = ["Unstepped"]

_logger = logging.getLogger("autopipe")
LOOKED_AT = 4
"""Of how many weights is seen whether they were changed."""


class Unstepped:
    """Watches some of a rank's weights from step to step."""

    def __init__(self) -> None:
        self._held: list[tuple[nn.Parameter, int]] = []
        self._was_stepped = self._has_told = self._has_told_of_kept = False

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take those with gradients as they are after a step."""
        with_gradient = (p for p in parameters if p.grad is not None)
        self._held = [(p, p._version) for p in itertools.islice(with_gradient, LOOKED_AT)]

    @property
    def was_changed(self) -> bool:
        """Whether some of those were changed since, as an optimizer does."""
        changed = any(p._version != version for p, version in self._held)
        self._was_stepped |= changed
        return changed

    @property
    def gradients(self) -> tuple[bool, bool]:
        """Whether all of those have their gradients still, and whether none has; neither without any."""
        with UnseenByFunctions():  # what has moved to another rank would answer at length
            kept = {p.grad is not None for p, _ in self._held}
        return kept == {True}, kept == {False}

    def tell_of_kept(self, rank: int, n_steps: int) -> None:
        """Warn once, on a rank that has gradients of the last step still while others have none."""
        if self.gradients[0] and not self._has_told_of_kept:
            self._has_told_of_kept = True
            _logger.warning(
                "rank %d: the gradients of step %d are still here, and gone on other ranks: those of the "
                "next add up here alone; call zero_grad() on every rank (not under `if rank == 0`)",
                rank,
                n_steps - 1,
            )

    def tell(self, rank: int, n_steps: int) -> None:
        """Warn once, on a rank that was stepped before and is not now while others are."""
        if self._was_stepped and self._held and not self.was_changed and not self._has_told:
            self._has_told = True
            _logger.warning(
                "rank %d: other ranks' weights were changed since step %d, as by an optimizer, and none of "
                "those looked at here: where ranks skip steps by what they see of gradients, each sees its "
                "own part; rt.clip_grad_norm_(float('inf')) gives the norm over all ranks, alike on each",
                rank,
                n_steps - 1,
            )
