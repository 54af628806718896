"""What ranks write up for all to see: the job's store, every text sealed, and nobody waiting on it for ever.

What is written is left to ``failure`` and ``peers``.
"""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from .key import Seal, attempt, job_key

__all__ = ["Board", "StoreGone"]

T = TypeVar("T")


class StoreGone(RuntimeError):
    """The store does not answer: its host is gone or stopped."""


class Board:
    """A corner of the job's store for one pipeline: ``name`` and the attempt keep it from others'.

    A thread of its own asks the store, so that a host that is stopped stops nobody: past ``answer_s()``
    seconds every call raises :class:`StoreGone`. Texts that were not sealed with the job's key are not there.
    """

    def __init__(self, store: Any, name: str, answer_s: Callable[[], float]) -> None:
        self.name = f"autopipe/{attempt()}/{name}"
        self.seal = Seal(job_key(), self.name)
        self._answer_s = answer_s
        self._asked: queue.SimpleQueue[_Ask | None] = queue.SimpleQueue()
        self._is_gone = False
        args = (store, self.name, self._asked)
        threading.Thread(target=_answer, args=args, name="autopipe board", daemon=True).start()
        weakref.finalize(self, self._asked.put, None)

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
        if self._is_gone:
            raise StoreGone("the store does not answer")
        ask = _Ask(question)
        self._asked.put(ask)
        if not ask.is_done.wait(self._answer_s()):
            self._is_gone = True
            raise StoreGone("the store does not answer")
        if ask.error is not None:
            raise StoreGone(str(ask.error)) from ask.error
        return ask.answer


def _compare_set(key: str, expected: str, new: str, store: Any) -> bytes:
    found: bytes = store.compare_set(key, expected, new)
    return found


class _Ask:
    """A question to the store, and its answer."""

    def __init__(self, question: Callable[[Any], Any]) -> None:
        self.question, self.is_done = question, threading.Event()
        self.answer: Any = None
        self.error: Exception | None = None


def _again(store: Any) -> Any:
    """A connection of its own, where the store has any."""
    return store.clone() if hasattr(store, "clone") else store


def _answer(store: Any, name: str, asked: queue.SimpleQueue[_Ask | None]) -> None:
    held: Any = None
    while (ask := asked.get()) is not None:
        try:
            if held is None:  # connecting may take as long as any question
                held = dist.PrefixStore(name, _again(store))  # type: ignore[attr-defined]
            ask.answer = ask.question(held)
        except Exception as error:  # told to who asked
            ask.error = error
        ask.is_done.set()
