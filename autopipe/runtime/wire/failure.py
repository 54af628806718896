"""One cause for every rank: errors published in the store, and a watch that ends waits without end.

What a rank does when it fails is left to ``executor``.

gloo and NCCL waits block with the interpreter released, so a thread can watch: twice a second it looks for
an error published by another rank and whether this rank still makes progress. When it must end a wait it
breaks the pipeline's own communicator, and the waiting call raises at once.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import StepError

__all__ = ["Patience", "Position", "Watch", "first_difference", "roll_call"]

POLL_S = 0.5
"""How often the watch looks; a failure elsewhere is noticed within two polls."""
QUIET_S = 2.0
"""How long a rank makes no progress before it publishes where it is."""
SIGN_OF_LIFE_S = 10 * POLL_S
"""A rank that published nothing for this long, while others wait, counts as dead or frozen."""
MIN_STALL_S = 60.0
STALL_STEPS = 20.0
FIRST_STEP_FACTOR = 5.0
LEAVE_S = 3 * POLL_S
"""How long the store's host waits at most for the others to know that it leaves."""
HOST_GONE = "the process that hosts the store is gone (rank 0 of the job, or its launcher)"
IDLE_FACTOR = 10.0
"""How much longer a rank may stay in the user's own code between steps: it may save, evaluate or log."""


@dataclasses.dataclass
class Patience:
    """How long a rank may make no progress: the user's limit, or far above the plan's times.

    Longer until ``is_warm``: first steps compile kernels, load libraries and open connections.
    """

    given_s: float | None
    step_s: float
    is_warm: bool = False

    @property
    def limit_s(self) -> float:
        if self.given_s is not None:
            return self.given_s
        limit_s = max(MIN_STALL_S, STALL_STEPS * self.step_s)
        return limit_s if self.is_warm else FIRST_STEP_FACTOR * limit_s


@dataclasses.dataclass
class Position:
    """Where a rank is: the step number, the index in its program, and what that is in words.

    ``waits_for`` is the rank it waits for, or -1 while it computes or is in the user's own code, where
    ``is_idle`` is set.
    """

    step: int = 0
    index: int = -1
    words: object = "the user's own code before its first step"
    waits_for: int = -1
    is_idle: bool = False
    _marks: Sequence[tuple[Any, Any, Any]] = ()
    _n_passed: int = 0

    def follow(self, marks: Sequence[tuple[Any, Any, Any]]) -> None:
        """Take a step's progress from the events of ``marks``, (what, before, after), as they come about."""
        self._n_passed, self._marks = 0, marks

    def seen(self) -> Position:
        """Where the device is, while it is behind the host; else where the host is."""
        marks = self._marks
        while self._n_passed < len(marks) and marks[self._n_passed][2].query():
            self._n_passed += 1
        if self._n_passed >= len(marks):
            return self
        words = marks[self._n_passed][0]
        peer = getattr(words, "peer", -1)
        index = -4 - self._n_passed  # the host's own are above
        return dataclasses.replace(self, index=index, words=words, waits_for=peer, is_idle=False)


class Watch:
    """Publishes this rank's failure, learns of others', and judges stalls.

    ``position`` says where this rank is; ``abort`` breaks the communicator so that a blocked call returns.
    ``host`` is the rank whose process hosts the store, -1 where none of these does.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        n_ranks: int,
        *,
        position: Callable[[], Position],
        abort: Callable[[], None],
        patience: Patience,
        host: int = -1,
    ) -> None:
        self._host, self._host_left = host, ""
        self._main, self._store = store, store.clone()
        self._rank, self._n_ranks = rank, n_ranks
        self._position, self._abort, self._patience = position, abort, patience
        self.failure: str | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="autopipe-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; at the latest when the interpreter ends, which no thread of ours must survive.

        Says to the others that this rank leaves. The store's host waits a moment until they know: who asks a
        store that is gone gets torch's warnings.
        """
        self._stop.set()
        self._thread.join(4 * POLL_S)
        if self.failure is not None or self._host_left:
            return
        deadline = time.monotonic() + LEAVE_S
        try:
            self._main.set(f"left/{self._rank}", self._why())
            n_done = self._main.add("done with the store", 1)
            while self._rank == self._host and n_done < self._n_ranks and time.monotonic() < deadline:
                time.sleep(0.01)
                n_done = self._main.add("done with the store", 0)
        except RuntimeError:
            return  # the store is gone, and whom it could tell knows

    def _why(self) -> str:
        step, error = self._position().step, getattr(sys, "last_value", None)
        if error is not None:  # what the interpreter ends with
            return f"stopped after batch {step} with {type(error).__name__}: {error}"
        return f"left after batch {step}; give every rank the same number of batches"

    def note_lost(self, peer: int) -> None:
        """Say that this rank lost its connection to ``peer``."""
        self._ask(lambda store: store.set(f"lost/{self._rank}", str(peer)))

    def first_lost(self, peer: int) -> int:
        """Where a loss began: a rank that lost another's connection itself only passes that on."""
        rank, seen = peer, {self._rank}
        while rank not in seen:
            seen.add(rank)
            found = self._ask(functools.partial(_get, f"lost/{rank}"))
            if found is None:
                return rank
            rank = int(found)
        return peer

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """What the store answers; None where it is gone."""
        try:
            with self._lock:
                return None if self._host_left else question(self._main)
        except RuntimeError:
            return None

    def left(self, rank: int) -> str:
        """In words, that another rank has left of its own accord; empty where it has not."""
        if self._host_left:
            return self._host_left if rank == self._host else ""
        return self._ask(functools.partial(self._find_left, rank)) or ""

    def _find_left(self, rank: int, store: Any) -> str:
        found = _get(f"left/{rank}", store)
        return "" if found is None else f"rank {rank} {found}"

    def publish(self, message: str) -> str:
        """Make ``message`` the cause every rank reports unless there is one; the cause that stands."""
        try:
            with self._lock:
                stands = self._host_left or self._main.compare_set("error", "", message).decode()
        except RuntimeError:
            stands = message  # the store's host is gone: peers learn from broken connections
        self.failure = self.failure or stands
        return self.failure

    def cause(self, wait_s: float = 1.0) -> str | None:
        """The published cause, waiting a moment for it to arrive."""
        deadline = time.monotonic() + wait_s
        while self.failure is None:
            with self._lock:
                found = self._look(self._main)
            if found or time.monotonic() > deadline:
                return found
            time.sleep(0.02)
        return self.failure

    def raise_if_failed(self) -> None:
        if self.failure is not None:
            raise StepError(self.failure)

    # -- the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        seen, since, told = (-1, -2), time.monotonic(), 0.0
        while not self._stop.wait(POLL_S):
            position = self._position()
            now = time.monotonic()
            if (position.step, position.index) != seen:
                seen, since = (position.step, position.index), now
            if self.failure is None:
                self.failure = self._look(self._store)
            if self.failure is None and self._host >= 0 and self._has_host_left():
                return
            if self.failure is not None:
                self._abort()
                return
            quiet_s = now - since
            if quiet_s > QUIET_S and now - told > QUIET_S:
                told = now
                self._tell(position, quiet_s)
            if position.waits_for >= 0 and quiet_s > self._patience.limit_s:
                try:
                    self.failure = self._judge(position, quiet_s)
                except RuntimeError:
                    self.failure = HOST_GONE

    def _has_host_left(self) -> bool:
        try:
            self._host_left = self._find_left(self._host, self._store)
            if self._host_left:
                self._store.add("done with the store", 1)
        except RuntimeError:
            self.failure = HOST_GONE
        return bool(self._host_left)

    def _look(self, store: Any) -> str | None:
        if self._host_left:
            return self._host_left
        try:
            return _get("error", store)
        except RuntimeError:
            return HOST_GONE

    def _tell(self, position: Position, quiet_s: float) -> None:
        report = {"step": position.step, "words": str(position.words), "waits_for": position.waits_for}
        report["is_idle"] = position.is_idle
        report |= {"quiet_s": quiet_s, "at": time.time()}
        try:
            self._store.set(f"position/{self._rank}", json.dumps(report))
        except RuntimeError:
            self.failure = HOST_GONE

    def _judge(self, position: Position, quiet_s: float) -> str | None:
        """Follow who waits for whom to the rank that holds everybody up, and publish it; None to wait on."""
        rank, report = position.waits_for, dict[str, Any]()
        seen = {self._rank: str(position.words)}
        while rank not in seen:
            report = self._read(rank)
            seen[rank] = report.get("words", "")
            if not report or report["waits_for"] < 0:
                break
            rank = report["waits_for"]
        stuck_s = report["quiet_s"] + time.time() - report["at"] if report else 0.0
        is_dead = not report or time.time() - report["at"] > SIGN_OF_LIFE_S
        limit_s = self._patience.limit_s
        if is_dead and quiet_s < limit_s + SIGN_OF_LIFE_S:
            return None  # it may be about to give one
        if not is_dead and report["is_idle"] and quiet_s < IDLE_FACTOR * limit_s:
            return None
        if is_dead:
            what = f"rank {rank} shows no sign of life"
        elif report["waits_for"] < 0:
            what = f"rank {rank} is stuck in {report['words']} for {stuck_s:.1f} s"
        else:
            places = ", ".join(f"rank {r} at {seen[r]}" for r in sorted(seen))
            what = f"ranks wait for one another: {places}; do the same on every rank, in the same order"
        message = (
            f"{what}; rank {self._rank} waited {quiet_s:.1f} s at {position.words}, the limit is "
            f"{limit_s:.1f} s (stall_limit_s)"
        )
        stands: str = self._store.compare_set("error", "", message).decode()
        return stands

    def _read(self, rank: int) -> dict[str, Any]:
        found = _get(f"position/{rank}", self._store)
        return {} if found is None else json.loads(found)


def _get(key: str, store: Any) -> str | None:
    """What the store holds under a key; None where nobody has set it."""
    return store.get(key).decode() if store.check([key]) else None


def roll_call(store: Any, rank: int, n_ranks: int, card: str, limit_s: float) -> tuple[str, ...]:
    """Every rank's ``card``, once all have shown theirs.

    Raises :class:`StepError` naming the ranks that did not come within ``limit_s``.
    """
    store.set(f"card/{rank}", card)
    deadline = time.monotonic() + limit_s
    missing = list(range(n_ranks))
    while missing:
        missing = [r for r in missing if not store.check([f"card/{r}"])]
        if missing and time.monotonic() > deadline:
            names = ", ".join(map(str, missing))
            raise StepError(
                f"rank {names} never started: no sign of it within {limit_s:.0f} s of rank {rank} making its "
                f"runtime; look at its log, and make the runtime on every rank"
            )
        if missing:
            time.sleep(0.01)
    return tuple(store.get(f"card/{r}").decode() for r in range(n_ranks))


def first_difference(cards: Sequence[str]) -> int | None:
    """The first rank whose card is not rank 0's."""
    return next((r for r, card in enumerate(cards) if card != cards[0]), None)
