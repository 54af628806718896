"""What ranks write up for all to see: the job's store, every text sealed, and nobody waiting on it for ever.

What is written is left to ``failure`` and ``peers``.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from .job_key import Seal, attempt, job_key

__all__ = ["Board", "StoreGone", "StoreSilent"]

T = TypeVar("T")


HOST = "the process that hosts the store"
WHICH = "(rank 0 of the job, or its launcher)"


class StoreGone(RuntimeError):
    """The store cannot be asked; says why, and where to look."""


class StoreSilent(StoreGone):
    """It has not answered in time, and yet may: its host is stopped, or has too much to do."""


class Board:
    """A corner of the job's store for one pipeline: ``name`` and the attempt keep it from others'.

    A thread of its own asks the store, so that a host that is stopped stops nobody: past ``answer_s()``
    seconds a call raises :class:`StoreSilent`, and so does every other at once until that is answered. One
    whose store is lost raises :class:`StoreGone`. Texts that were not sealed with the job's key are not
    there.
    """

    def __init__(self, store: Any, name: str, answer_s: Callable[[], float]) -> None:
        self._take(name, _Line(store, answer_s))

    def _take(self, name: str, line: _Line) -> None:
        self.name = f"autopipe/{attempt()}/{name}"
        self.seal = Seal(job_key(), self.name)
        self._line = line

    def corner(self, name: str) -> Board:
        """Another pipeline's corner of the store, over this one's connection and thread."""
        other = Board.__new__(Board)
        other._take(name, self._line)
        return other

    def close(self) -> None:
        """End the thread, once it has answered; who asks this board or a corner of it then is refused."""
        self._line.close()

    def connection(self) -> Any:
        """Another connection to this corner of the store, for who may wait on it longer."""
        return self._ask(_again)

    def post(self, key: str, text: str) -> None:
        """Write a text under a key."""
        sealed = self.seal.close(key, text)
        self._ask(lambda store: store.set(key, sealed))

    def look(self, key: str) -> str | None:
        """The text under a key; None where there is none of ours."""
        found = self._ask(lambda store: store.get(key) if store.check([key]) else None)
        return None if found is None else self.seal.open(key, found)

    def post_first(self, key: str, text: str) -> str:
        """Write a text unless there is one of ours; the one that stands."""
        sealed, expected = self.seal.close(key, text), ""
        while True:
            found = self._ask(functools.partial(_compare_set, key, expected, sealed))
            stands = self.seal.open(key, found)
            if stands is not None:
                return stands
            expected = found.decode(errors="surrogateescape")

    def count(self, key: str, n: int) -> int:
        """Add to a number; the sum."""
        return int(self._ask(lambda store: store.add(key, n)))

    def _ask(self, question: Callable[[Any], T]) -> T:
        return self._line.ask(lambda store: question(dist.PrefixStore(self.name, store)))  # type: ignore[attr-defined]


class _Line:
    """A connection to the store, and the thread that asks by it, one question at a time."""

    def __init__(self, store: Any, answer_s: Callable[[], float]) -> None:
        self._answer_s = answer_s
        self._asked: queue.SimpleQueue[_Ask | None] = queue.SimpleQueue()
        self._late: _Ask | None = None
        args = (store, self._asked)
        threading.Thread(target=_answer, args=args, name="autopipe board", daemon=True).start()
        self.close = weakref.finalize(self, self._asked.put, None)

    def ask(self, question: Callable[[Any], T]) -> T:
        """What the store answers."""
        if not self.close.alive:
            raise StoreGone("the pipeline has ended, and with it what it asked the job's store by")
        late, limit_s = self._late, self._answer_s()
        if late is None or late.is_done.is_set():
            ask = _Ask(question)
            self._asked.put(ask)
            late = None if ask.is_done.wait(limit_s) else ask
            self._late = late
        if late is not None:
            raise StoreSilent(
                f"{HOST} has not answered for {time.monotonic() - late.asked_s:.1f} s {WHICH}, the limit is "
                f"{limit_s:.1f} s (stall_limit_s): it is stopped, or its machine has too much to do"
            )
        if isinstance(ask.error, (ConnectionError, dist.DistNetworkError)):
            raise StoreGone(f"{HOST} is gone {WHICH}; look at its log") from ask.error
        if ask.error is not None:
            first_line = str(ask.error).partition("\n")[0]  # torch's have the stack below it
            raise StoreGone(
                f"the job's store failed: {type(ask.error).__name__}: {first_line}"
            ) from ask.error
        answer: T = ask.answer
        return answer


def _compare_set(key: str, expected: str, new: str, store: Any) -> bytes:
    found: bytes = store.compare_set(key, expected, new)
    return found


class _Ask:
    """A question to the store, and its answer."""

    def __init__(self, question: Callable[[Any], Any]) -> None:
        self.question, self.is_done = question, threading.Event()
        self.asked_s = time.monotonic()
        self.answer: Any = None
        self.error: Exception | None = None


def _again(store: Any) -> Any:
    """A connection of its own, where the store has any."""
    return store.clone() if hasattr(store, "clone") else store


def _answer(store: Any, asked: queue.SimpleQueue[_Ask | None]) -> None:
    held: Any = None
    while (ask := asked.get()) is not None:
        try:
            if held is None:  # connecting may take as long as any question
                held = _again(store)
            ask.answer = ask.question(held)
        except Exception as error:  # told to who asked
            ask.error = error
        ask.is_done.set()
        del ask  # who asked is not kept until the next question
