"""How many rows a form may be run on: as many as the batch has that it is captured for, or for little memory.

What is to be asked of more rows than these is told, and asked once such a batch comes: see ``Mixing``.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from ...torch_private import TorchDispatchMode
from ..calls.faults import of_models
from ..calls.functions import storages, tensors
from .results import Rows

__all__ = ["Affordable"]

_logger = logging.getLogger("autopipe")
_LITTLE_BYTES = 1 << 26
"""What a forward may make in all, of however many rows, where that is more rows than the batch has."""
_N_RUN = 2


class Affordable:
    """As many rows as a form may be run on: the ``n_rows`` of the batch, more while they make little.

    ``run`` runs it on rows a and b alone; the order that it is run in decides nothing.
    """

    def __init__(self, n_rows: int, run: Rows) -> None:
        self._n_rows, self._run = max(n_rows, _N_RUN), run

    def __call__(self, n: int) -> bool:
        """Whether the form may be run on ``n`` rows."""
        return n <= self._n_rows or n <= self.most

    @functools.cached_property
    def most(self) -> int:
        """The most rows that it may be run on. Takes a run on two rows."""
        made = _Made()
        try:
            with torch.no_grad(), made:
                self._run("a" + "b" * (_N_RUN - 1))
        except of_models() as error:
            # any Python of the model, which may not run while somebody watches what torch is asked
            _logger.debug("what rows make was not counted: %s", error)
            return self._n_rows
        return max(self._n_rows, _N_RUN * _LITTLE_BYTES // max(made.n_bytes, 1))


class _Made(TorchDispatchMode):
    """Counts the bytes of the tensors that ops make, also within layers; views of others are none."""

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = frozenset[int]().union(*map(storages, tensors((args, kwargs))))
        self.n_bytes += sum(t.nbytes for t in tensors(result) if given.isdisjoint(storages(t)))
        return result
