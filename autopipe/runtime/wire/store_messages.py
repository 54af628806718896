"""Ranks of one mind before there is a pipeline: texts by way of the board, and nobody waits for who is gone.

What they agree on is left to ``api``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ...errors import AutopipeError, StepError
from ...torch_private import default_store
from .board import Board, StoreGone, StoreSilent
from .ended import ended
from .refused import refusal, say_refused

__all__ = ["SILENCE_S", "Talk", "call_of_all"]

SIGN_S = 1.0
SILENCE_S = 60.0
"""How long a rank may give no sign of life; until its first, ``LATE_FACTOR`` times as long."""
LATE_FACTOR = 5.0


class _Call:
    """A call that all ranks of a group make, the ``n``-th of this process, and its talks so far."""

    def __init__(self, n: int = 0) -> None:
        self.n, self.n_talks = n, 0

    def corner(self, n_ranks: int) -> str:
        """Where in the job's store it is spoken of; groups of other sizes may come after one another."""
        return f"talk/{n_ranks}/{self.n}"


_calls: dict[int, _Call] = {}
"""The last of each size of a group."""


@contextlib.contextmanager
def call_of_all(name: str) -> Iterator[None]:
    """Within it each rank makes the call ``name``. What ends it on one, the others hear where they talk."""
    n_ranks = dist.get_world_size()
    call = _calls[n_ranks] = _Call(_calls.get(n_ranks, _Call()).n + 1)
    try:
        yield
    except BaseException as error:
        say_refused(call.corner(n_ranks), name, dist.get_rank(), error)
        raise
    finally:
        _calls[n_ranks] = _Call(call.n + 1)  # ranks that left at unlike points talk of what comes next


class Talk:
    """A talk of all ranks of the process group; each enters it at the same point of the same script.

    While it lasts a thread gives a sign of life every second, so that a rank that is killed or stopped is
    told from one that is busy. ``limit_s`` is how long it may be silent.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self.rank, self.n_ranks = dist.get_rank(), dist.get_world_size()
        call = _calls.setdefault(self.n_ranks, _Call())
        call.n_talks += 1
        self._limit_s = SILENCE_S if limit_s is None else limit_s
        self._late_factor = LATE_FACTOR if limit_s is None else 1.0
        store: Any = default_store()
        corner = call.corner(self.n_ranks)
        self._board = Board(store, f"{corner}/{call.n_talks}", lambda: self._limit_s)
        self._refusals = self._board.corner(corner)
        self._heard: dict[int, tuple[str | None, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._live, name="autopipe talk", daemon=True)

    def __enter__(self) -> Talk:
        self._began = time.monotonic()
        self.tell("alive", "0")
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._board.close()

    def _live(self) -> None:
        n = 0
        while True:
            n += 1
            try:
                self._board.post(f"alive/{self.rank}", str(n))
            except StoreGone as error:
                if not isinstance(error, StoreSilent):
                    return  # who asks the board next says so
            if self._stop.wait(SIGN_S):
                return

    def tell(self, key: str, text: str) -> None:
        """Say something to all."""
        self._ask(lambda: self._board.post(f"{key}/{self.rank}", text))

    def hear(self, key: str, source: int, words: str) -> str:
        """What rank ``source`` says; ``words`` are what this rank does meanwhile.

        Raises :class:`StepError` when that rank falls silent, or its process has ended, and what
        :func:`refusal` gives where it has left the call.
        """
        pause_s, error = 1e-3, None
        while True:
            found = self._ask(lambda: self._board.look(f"{key}/{source}"))
            if found is not None:
                return str(found)
            if error is not None:
                raise error
            error = self._find_gone(source)  # who ends may have said it just before: it is looked for again
            if error is None:
                self._check(source, words)
                time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)

    def gather(self, key: str, text: str, words: str) -> list[str]:
        """What every rank says, in their order."""
        self.tell(key, text)
        found = [self.hear(key, source, words) for source in range(self.n_ranks)]
        self.settle(key)
        return found

    def settle(self, key: str) -> None:
        """Say that all of ``key`` was heard; rank 0, which may host the store, stays till all have."""
        self.tell(f"{key} heard", "")
        for source in range(1, self.n_ranks) if self.rank == 0 else ():
            self.hear(f"{key} heard", source, "the others hear")

    def _ask(self, question: Any) -> Any:
        try:
            return question()
        except StoreGone as error:
            raise StepError(str(error)) from error

    def _find_gone(self, source: int) -> AutopipeError | None:
        """Why a rank says nothing more; None where nothing says that it does not."""
        if error := self._ask(lambda: refusal(self._refusals, source)):
            return error
        gone = self._ask(lambda: ended(self._board, source))
        return StepError(gone) if gone else None

    def _check(self, source: int, words: str) -> None:
        sign = self._ask(lambda: self._board.look(f"alive/{source}"))
        last, since = self._heard.get(source, (None, self._began))
        if sign != last:
            since = time.monotonic()
        self._heard[source] = sign, since
        silent_s = time.monotonic() - since
        if silent_s > self._limit_s * (1.0 if sign else self._late_factor):
            what = "shows no sign of life (killed or stopped, or its host is)" if sign else "never came"
            raise StepError(
                f"rank {source} {what}: rank {self.rank} waited {silent_s:.0f} s for it while {words}; look "
                f"at its log, and call split on every rank"
            )
