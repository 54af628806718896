"""One cause for every rank: errors published in the store, and a watch that ends waits without end.

What a rank does when it fails is left to ``executor``.

gloo and NCCL waits block with the interpreter released, so a thread can watch: twice a second it looks for
an error published by another rank and whether this rank still makes progress. When it must end a wait it
breaks the pipeline's own communicator, and the waiting call raises at once.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from ...errors import AutopipeError, StepError
from .board import Board, StoreGone, StoreSilent
from .job_key import KEY_VARIABLE
from .position import Patience, Position

__all__ = ["Watch", "first_difference", "roll_call"]

T = TypeVar("T")
POLL_S = 0.5
"""How often the watch looks; a failure elsewhere is noticed within two polls."""
QUIET_S = 2.0
"""How long a rank makes no progress before it publishes where it is."""
SIGN_OF_LIFE_S = 10 * POLL_S
"""A rank that published nothing for this long, while others wait, counts as dead or frozen."""
LEAVE_S = 3 * POLL_S
"""How long the store's host waits at most for the others to know that it leaves."""
LIFELESS = "shows no sign of life (killed or stopped, or its host is)"
LIMIT = "(stall_limit_s)"
IDLE_FACTOR = 10.0
"""How much longer a rank may stay in the user's own code between steps: it may save, evaluate or log."""


class Sign(msgspec.Struct, frozen=True):
    """A rank's ``n``-th sign of life: where it is, whom it waits for, and how long it made no progress.

    ``blocked``: where it waits for one of these ranks in another pipeline, ``blocked_in`` that one's corner,
    and ``blocked_s`` for how long.
    """

    n: int
    words: str
    waits_for: int
    is_idle: bool
    quiet_s: float
    blocked: str = ""
    blocked_in: str = ""
    blocked_s: float = 0.0


_watches: list[Watch] = []
"""Of this process's pipelines, until they are closed."""


class Watch:
    """Publishes this rank's failure, learns of others', and judges stalls.

    ``position`` says where this rank is; ``abort`` breaks the communicator so that a blocked call returns.
    ``host`` is the rank whose process hosts the store, -1 where none of these does. ``broken`` gives the
    ranks whose direct connections are closed. ``members`` are the job's numbers of the ranks.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        n_ranks: int,
        *,
        position: Callable[[], Position],
        abort: Callable[[], None],
        patience: Patience,
        host: int = -1,
        broken: Callable[[], Sequence[int]] = tuple,
        members: Sequence[int] = (),
    ) -> None:
        self._members, self._since = members or range(n_ranks), time.monotonic()
        self._host, self._host_left = host, ""
        self._board, self._broken = board, broken
        self._heard: dict[int, tuple[int, float]] = {}
        self._n_told = 0
        self._rank, self._n_ranks = rank, n_ranks
        self._position, self._abort, self._patience = position, abort, patience
        self._n_shown = 0
        self.failure: str | None = None
        self._stop = threading.Event()
        _watches.append(self)
        self._thread = threading.Thread(target=self._run, name="autopipe-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; at the latest when the interpreter ends, which no thread of ours must survive.

        Says to the others that this rank leaves. The store's host waits a moment until they know: who asks a
        store that is gone gets torch's warnings.
        """
        self._stop.set()
        if self in _watches:
            _watches.remove(self)
        if threading.current_thread() is not self._thread:  # garbage of any thread may be what closes it
            self._thread.join(4 * POLL_S)
        if self.failure is not None or self._host_left:
            return
        deadline = time.monotonic() + LEAVE_S
        try:
            self._board.post(f"left/{self._rank}", self._why())
            n_done = self._board.count("done with the store", 1)
            while self._rank == self._host and n_done < self._n_ranks and time.monotonic() < deadline:
                time.sleep(0.01)
                n_done = self._board.count("done with the store", 0)
        except RuntimeError:
            return  # the store is gone, and whom it could tell knows

    def _why(self) -> str:
        step, error = self._position().step, getattr(sys, "last_value", None)
        if error is not None:  # what the interpreter ends with
            return f"stopped after batch {step} with {type(error).__name__}: {error}"
        return f"left after batch {step}; give every rank the same number of batches"

    def note_lost(self, peer: int) -> None:
        """Say that this rank lost its connection to ``peer``."""
        with contextlib.suppress(StoreGone):
            self._board.post(f"lost/{self._rank}", str(peer))

    def first_lost(self, peer: int) -> int:
        """Where a loss began: a rank that lost another's connection itself only passes that on."""
        rank, seen = peer, {self._rank}
        while rank not in seen:
            seen.add(rank)
            found = self._look_for(f"lost/{rank}")
            if found is None:
                return rank
            rank = int(found)
        return peer

    def lost(self, peer: int) -> str:
        """In words, that this rank's connection to ``peer`` broke: where that began, as far as is known."""
        self.note_lost(peer)
        gone = self.first_lost(peer)
        return self.left(gone) or (
            f"rank {gone} is gone without a word (killed, or it left early): rank {self._rank} lost its "
            f"connection at {self._position().words}"
        )

    def _look_for(self, key: str) -> str | None:
        """What the board has; None where the store is gone."""
        try:
            return None if self._host_left else self._board.look(key)
        except StoreGone:
            return None

    def left(self, rank: int) -> str:
        """In words, that another rank has left of its own accord; empty where it has not."""
        if self._host_left:
            return self._host_left if rank == self._host else ""
        found = self._look_for(f"left/{rank}")
        return "" if found is None else f"rank {rank} {found}"

    def publish(self, message: str) -> str:
        """Make ``message`` the cause every rank reports unless there is one; the cause that stands."""
        try:
            stands = self._host_left or self._board.post_first("error", message)
        except StoreGone:
            stands = message  # the store's host is gone: peers learn from broken connections
        self.failure = self.failure or stands
        return self.failure

    def cause(self, wait_s: float = 1.0) -> str | None:
        """The published cause, waiting a moment for it to arrive."""
        deadline = time.monotonic() + wait_s
        while self.failure is None:
            found = self._look()
            if found or time.monotonic() > deadline:
                return found
            time.sleep(0.02)
        return self.failure

    def raise_if_failed(self) -> None:
        if self.failure is not None:
            raise StepError(self.failure)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Within it this rank gives signs of life whatever it does: others may :meth:`await_aside` it."""
        self._n_shown += 1
        try:
            yield
        finally:
            self._n_shown -= 1

    def await_aside(self, rank: int, look: Callable[[], T | None], words: str) -> T:
        """What ``look`` finds of another rank, asked for in a thread beside the one that trains.

        Raises :class:`StepError`, on every rank, where that rank is gone or gives no sign of life for longer
        than the limit, or makes no progress for as long as one may stay in the user's own code.
        """
        began_s = heard_s = time.monotonic()
        while (found := look()) is None:
            self.raise_if_failed()
            now = time.monotonic()
            if now - heard_s > POLL_S:
                heard_s = now
                cause = self._judge_aside(rank, now - began_s, words)
                if cause:
                    raise StepError(self.publish(cause))
            time.sleep(0.01)
        return found

    def _judge_aside(self, rank: int, waited_s: float, words: str) -> str:
        sign, silent_s = self._hear(rank)
        limit_s = self._patience.limit_s
        if waited_s > limit_s + SIGN_OF_LIFE_S and (sign is None or silent_s > SIGN_OF_LIFE_S):
            what = f"rank {rank} {LIFELESS}"
        elif waited_s > IDLE_FACTOR * limit_s:
            what = f"rank {rank} is stuck in {words}"
        else:
            return ""
        return (
            f"{what}; rank {self._rank} waited {waited_s:.1f} s for it, the limit is {limit_s:.1f} s {LIMIT}"
        )

    # -- the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        seen, told = (-1, -2), 0.0
        while not self._stop.wait(POLL_S):
            try:
                position = self._position()
            except RuntimeError as error:  # what failed on the device is told to whoever asks it next
                self.failure = self.publish(f"rank {self._rank}'s device failed: {error}")
                self._abort()
                return
            now = time.monotonic()
            if (position.step, position.index) != seen:
                seen, self._since = (position.step, position.index), now
            if self.failure is None:
                self.failure = self._look() or self._find_broken()
            if self.failure is None and self._host >= 0 and self._has_host_left():
                return
            if self.failure is not None:
                self._abort()
                return
            quiet_s = now - self._since
            if (quiet_s > QUIET_S or self._n_shown) and now - told > QUIET_S:
                told = now
                self._tell(position, quiet_s)
            if position.waits_for >= 0 and quiet_s > self._patience.limit_s:
                try:
                    self.failure = self._judge(position, quiet_s)
                except StoreGone as error:
                    self.failure = str(error)
            elif position.is_at_work and quiet_s > self._own_limit_s:
                self.failure = self.publish(self._stuck(self._rank, position.words, quiet_s))

    @property
    def _own_limit_s(self) -> float:
        """When a rank ends itself: past the moment at which any other of its pipeline would have told."""
        return self._patience.busy_factor * self._patience.limit_s + SIGN_OF_LIFE_S

    def _stuck(self, rank: int, words: object, quiet_s: float) -> str:
        return f"rank {rank} is stuck in {words} for {quiet_s:.1f} s"

    def _find_broken(self) -> str | None:
        """The cause where a rank is gone without having left."""
        for rank in self._broken():
            if not self.left(rank):
                return self.publish(self.lost(rank))
        return None

    def _has_host_left(self) -> bool:
        try:
            found = self._board.look(f"left/{self._host}")
            if found is not None:
                self._board.count("done with the store", 1)
                self._host_left = f"rank {self._host} {found}"
        except StoreGone as error:
            self._note_lost_store(error)
        return bool(self._host_left)

    def _look(self) -> str | None:
        if self._host_left:
            return self._host_left
        try:
            return self._board.look("error")
        except StoreSilent:
            return None  # no harm to who needs nobody; who waits for a rank then cannot judge it
        except StoreGone as error:
            return str(error)

    def _note_lost_store(self, error: StoreGone) -> None:
        if not isinstance(error, StoreSilent):
            self.failure = str(error)

    def _tell(self, position: Position, quiet_s: float) -> None:
        self._n_told += 1
        words, blocked = str(position.words), self._find_blocked()
        report = Sign(self._n_told, words, position.waits_for, position.is_idle, quiet_s, *blocked)
        try:
            self._board.post(f"position/{self._rank}", msgspec.json.encode(report).decode())
        except StoreGone as error:
            self._note_lost_store(error)

    def _find_blocked(self) -> tuple[str, str, float]:
        """Where, in what corner and how long this rank waits for one of these in another pipeline."""
        for other in [w for w in _watches if w is not self and w.failure is None]:
            try:
                at = other._position()
            except RuntimeError:  # its device failed, which it tells itself
                continue
            if at.waits_for >= 0 and other._members[at.waits_for] in self._members:
                return f"{at.words} of another pipeline", other._board.name, time.monotonic() - other._since
        return "", "", 0.0

    def _judge(self, position: Position, quiet_s: float) -> str | None:
        """Follow who waits for whom to the rank that holds everybody up, and publish it; None to wait on."""
        rank, sign, silent_s = position.waits_for, None, 0.0
        heard = {r: self._hear(r) for r in range(self._n_ranks) if r != self._rank}
        seen = {self._rank: str(position.words)}
        while rank not in seen:
            sign, silent_s = heard[rank]
            seen[rank] = sign.words if sign else ""
            if sign is None or silent_s > SIGN_OF_LIFE_S or sign.waits_for < 0:
                break  # where a rank that fell silent last waited says nothing
            rank = sign.waits_for
        limit_s = self._patience.limit_s
        is_alive = sign is not None and silent_s <= SIGN_OF_LIFE_S
        if not is_alive and quiet_s < limit_s + SIGN_OF_LIFE_S:
            return None  # it may be about to give one
        if is_alive and sign is not None and sign.waits_for < 0:
            longer = IDLE_FACTOR if sign.is_idle else self._patience.busy_factor
            if quiet_s < longer * limit_s and sign.blocked_s <= limit_s:
                return None
        if not is_alive or sign is None:
            what = f"rank {rank} {LIFELESS}"
        elif sign.waits_for < 0 and not sign.blocked:
            what = self._stuck(rank, sign.words, sign.quiet_s + silent_s)
        else:
            seen[rank] = sign.blocked or seen[rank]
            places = ", ".join(f"rank {r} at {seen[r]}" for r in sorted(seen))
            what = f"ranks wait for one another: {places}; do the same on every rank, in the same order"
        message = (
            f"{what}; rank {self._rank} waited {quiet_s:.1f} s at {position.words}, the limit is "
            f"{limit_s:.1f} s {LIMIT}"
        )
        for other in [w for w in _watches if sign and w._board.name == sign.blocked_in]:
            other.publish(message)  # that one ends too
        return self._board.post_first("error", message)

    def _hear(self, rank: int) -> tuple[Sign | None, float]:
        """A rank's last sign of life, and for how long it has been the last: by this rank's own clock.

        One that has not been seen to follow another may be old, and counts as none.
        """
        found = self._board.look(f"position/{rank}")
        if found is None:
            return None, 0.0
        sign = msgspec.json.decode(found, type=Sign)
        n_seen, since = self._heard.get(rank, (sign.n, -math.inf))
        if n_seen != sign.n:
            since = time.monotonic()
        self._heard[rank] = sign.n, since
        return sign, time.monotonic() - since


def roll_call(
    board: Board,
    rank: int,
    n_ranks: int,
    card: str,
    limit_s: float,
    gone: Callable[[int], AutopipeError | None],
) -> tuple[str, ...]:
    """Every rank's ``card``, once all have shown theirs.

    Raises :class:`StepError` naming the ranks that did not come within ``limit_s``, or at once what says
    that one has ``gone``.
    """
    board.post(f"card/{rank}", card)
    deadline = time.monotonic() + limit_s
    cards: dict[int, str] = {}
    missing, error = list(range(n_ranks)), None
    while missing:
        cards |= {r: found for r in missing if (found := board.look(f"card/{r}"))}
        missing = [r for r in missing if r not in cards]
        if error is not None and missing:
            board.post(f"card/{rank}", "")  # who comes later is not to take it for this rank's presence
            raise error
        error = next(filter(None, map(gone, missing)), None)
        if error is not None:
            continue  # who ends may have shown its card just before
        if missing and time.monotonic() > deadline:
            names = ", ".join(map(str, missing))
            raise StepError(
                f"rank {names} never started: no sign of it within {limit_s:.0f} s of rank {rank} making its "
                f"runtime; look at its log, and make the runtime on every rank (with the same "
                f"{KEY_VARIABLE}, where one is set)"
            )
        if missing:
            time.sleep(0.01)
    return tuple(cards[r] for r in range(n_ranks))


def first_difference(cards: Sequence[str]) -> int | None:
    """The first rank whose card is not rank 0's."""
    return next((r for r, card in enumerate(cards) if card != cards[0]), None)
