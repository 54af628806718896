"""How each step's loss is made: once of all microbatches, or of each; and when a ``loss_fn`` is asked.

What it is asked is left to ``asking``; making the loss to ``loss``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from ...tracing.state.state import Snapshot
from ..data.microbatch import Batch
from ..options import Options, is_due
from .asking import Verdict, spread
from .goes_by import GoesBy

__all__ = ["Choice"]

_MOST_CUTS = 8
"""So many ways to cut a batch in rows are asked about when they are met."""
_MOST_WAYS = 32
"""So many times it is asked since what it goes by has changed, or told nothing before."""

Manner = Literal["batch", "asked", "pairs", "each"]
"""How a step's loss is made: once of all microbatches; of all or of each, as it answers when asked; of
each, with questions about the first two and the last two; of each."""


class Choice:
    """Says how the loss of each step is made, on every rank alike.

    Unless an option tells, a ``loss_fn`` is asked at steps 0, 1, 2, 4, 8 and so on, where a batch is cut
    otherwise than before, where microbatches first have unlike shares of labels that it may leave out, and
    where its user has set something that its code goes by, as an epoch, a weight or a flag, or it had no
    gradient when it was asked.
    Once one call for all gave another loss, all further ones are of the whole batch. Where memory has no room
    for every forward first, and of torch's own losses, two microbatches are asked about.

    Attributes
    ----------
    manner: how the loss of the step under way is made.
    is_on_batch: whether all further losses are made of the whole batch, as far as this rank knows.
    has_found: whether this rank has found that they are to be.
    """

    def __init__(self, options: Options, *, is_on_host: bool, is_torchs: bool) -> None:
        """``is_on_host``: whether all ranks' devices are. ``is_torchs``: whether the loss is torch's own."""
        self.manner: Manner = "each"
        self.is_on_batch, self.has_found = options.loss_on == "batch", False
        is_told = options.loss_weight is not None or options.loss_on is not None
        self._asks = options.loss_fn is not None and not is_told
        self._is_on_host, self._is_torchs = is_on_host, is_torchs
        self._has_replicas = options.has_replicas
        self._is_of_several = False
        self._has_room: Callable[[], bool] = bool
        self._cuts: set[tuple[int, tuple[int, ...]]] = set()
        self._marks: set[int] = set()
        self._marks_asked: set[int] = set()
        self._goes_by: GoesBy | None = None
        self._ways: set[tuple[Any, ...]] = set()
        self._n_ways, self._is_untold = 0, False

    def choose(
        self, batch: Batch, *, grad: bool, n_done: int, has_room: Callable[[], bool], is_one: bool
    ) -> None:
        """Say it of a step.

        ``n_done``: how many steps are done, of those that all replicas make. ``has_room``: whether every rank
        has room for all microbatches. ``is_one``: whether there is one loss at most, whatever it is.
        """
        self.manner, self._has_room = "each", has_room
        self._is_of_several = batch.n_microbatches > 1 and not is_one
        if not self._is_of_several or not (self._asks or self.is_on_batch):
            return
        if self.is_on_batch:
            self.manner = "batch"
            return
        asks = self._is_due(n_done) if grad else not self._cuts
        cut = batch.kind, batch.rows
        if not self._has_replicas:  # which cut their batches each in its own way
            asks |= cut not in self._cuts and len(self._cuts) < _MOST_CUTS
        if asks:
            self._cuts.add(cut)
            self.ask()

    def ask(self) -> None:
        """Ask in the step that begins, as every rank does alike."""
        if self.manner == "each" and self._is_of_several:
            self.manner = "pairs" if self._is_torchs or not self._has_room() else "asked"

    def has_to_ask(self, targets: Any) -> bool:
        """Whether labels of the step under way, or what it goes by, say that: known on one rank alone."""
        if self.manner != "each" or not self._is_of_several:
            return False
        if self._may_go_otherwise():
            self._n_ways += 1
            return True
        return bool(self._marks and spread(targets, self._marks - self._marks_asked))

    def _may_go_otherwise(self) -> bool:
        if self._goes_by is None or self._n_ways == _MOST_WAYS:
            return False
        return self._is_untold or self._goes_by.state() not in self._ways

    def note(self, targets: Sequence[Any], verdict: Verdict, snapshot: Snapshot) -> None:
        """It was asked about these targets, and goes by what a ``snapshot`` of it reaches."""
        self._is_untold = verdict.is_idle
        self._marks |= {*verdict.marks}
        self._marks_asked |= spread(targets, self._marks)
        self._goes_by = GoesBy(snapshot)
        self._ways.add(self._goes_by.state())

    def find(self) -> None:
        """It was found to take the whole batch in the step under way."""
        self.manner, self.has_found = "batch", True
        self.is_on_batch = not self._has_replicas  # which agree on it

    def follow(self) -> None:
        """Another rank has found that."""
        self.is_on_batch = True
        self.manner = "batch" if self._is_of_several else "each"

    def may_find(self, n_done: int) -> bool:
        """Whether replicas may find that it takes the whole batch after so many steps that all have made.

        On each the same, whatever its batch is.
        """
        return self._asks and not self.is_on_batch and self._is_due(n_done)

    def may_be_told(self, n_done: int) -> bool:
        """Whether replicas tell one another in such a step that one has to ask; on each the same too."""
        return self._asks and not self.is_on_batch and self._is_on_host and not self._is_due(n_done)

    def _is_due(self, n_done: int) -> bool:
        # each look waits for the device, so there it ends with the warm-up
        return is_due(n_done) and (n_done < 2 or self._is_on_host)
