"""What the ranks of a pipeline tell one another in small structs, typed and sealed with the job's key.

Tensors are left to ``channel``, who the ranks are and how they end to ``peers``.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from ...errors import StepError
from .board import Board, StoreGone
from .failure import Watch
from .group import FOREVER, HostGroup
from .position import Position

__all__ = ["ControlMessages"]

T = TypeVar("T")
MAX_MESSAGE_BYTES = 64 << 20
STRANGE = (
    "rank {} was sent what is no message of this call: another rank is at another one (step, evaluate, save, "
    "merge and report on every rank alike, not under `if rank == 0`), or it is without the job's key "
    "(somebody else reaches its ports: keep them within the job's own network)"
)
N_PINGS = 8
TOLD_AHEAD = 32
"""How many messages may be on their way to be heard; they are small."""


class ControlMessages:
    """One rank's end of what is told. Whoever joins the ranks gives it the board, the watch and the rest."""

    board: Board
    watch: Watch
    position: Position
    control: HostGroup

    def __init__(self, rank: int, n_ranks: int) -> None:
        self.rank, self.n_ranks = rank, n_ranks
        self._telling: collections.deque[tuple[Any, Tensor]] = collections.deque()
        self._n_told, self._n_heard = [0] * n_ranks, [0] * n_ranks

    def tell(self, thing: Any, peer: int) -> None:
        """Send one rank a small struct; it arrives where that rank calls :meth:`hear` with its type."""
        place = f"{self.rank}>{peer}/{self._n_told[peer]}"
        self._n_told[peer] += 1
        sealed = self.board.seal.close(place, msgspec.json.encode(thing).decode())
        data = torch.frombuffer(bytearray(sealed.encode()), dtype=torch.uint8)
        for message in (torch.tensor([data.numel()], device="cpu"), data):
            self._telling.append((self.control.send(message, peer), message))
        if len(self._telling) > TOLD_AHEAD:
            self._telling.popleft()[0].wait(FOREVER)

    def hear(self, peer: int, kind: type[T]) -> T:
        """What ``peer`` told, in its order. Raises :class:`StepError` for what no rank of ours sent."""
        place = f"{peer}>{self.rank}/{self._n_heard[peer]}"
        self._n_heard[peer] += 1
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        self.control.recv(length, peer).wait(FOREVER)
        if not 0 < int(length) <= MAX_MESSAGE_BYTES:
            raise StepError(self.watch.publish(STRANGE.format(self.rank)))
        data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        self.control.recv(data, peer).wait(FOREVER)
        text = self.board.seal.open(place, data.numpy().tobytes())
        if text is not None:
            with contextlib.suppress(msgspec.ValidationError):  # of another call of ours
                return msgspec.json.decode(text, type=kind)
        raise StepError(self.watch.publish(STRANGE.format(self.rank)))

    def finish_telling(self) -> None:
        """Wait until all that was told has left."""
        while self._telling:
            self._telling.popleft()[0].wait(FOREVER)

    def share(self, thing: T, source: int, kind: Any = None) -> T:
        """A small struct of pipeline rank ``source``, on every rank; ``kind`` is its type, by default that of
        what every rank passes."""
        if self.rank == source:
            for peer in range(self.n_ranks):
                if peer != source:
                    self.tell(thing, peer)
            self.finish_telling()
            return thing
        waited, self.position.waits_for = self.position.waits_for, source
        found: T = self.hear(source, kind or type(thing))
        self.position.waits_for = waited
        return found

    def gather(self, mine: T, kind: Any = None) -> list[T]:
        """Every rank's small struct, on every rank."""
        return [self.share(mine, source, kind) for source in range(self.n_ranks)]

    def exchange_aside(self, kind: type[T], name: str, words: str) -> Callable[[T], list[T]]:
        """A way for a thread of its own to bring a small struct of every rank to every rank.

        By way of the board; what every rank calls it with comes together in turn. ``words`` say what the
        threads do; each does it within ``watch.shown()``.
        """
        rounds = itertools.count()

        def exchange(mine: T) -> list[T]:
            turn = f"{name}/{next(rounds)}"
            try:
                self.board.post(f"{turn}/{self.rank}", msgspec.json.encode(mine).decode())
                looks = [functools.partial(self.board.look, f"{turn}/{r}") for r in range(self.n_ranks)]
                found = [self.watch.await_aside(r, look, words) for r, look in enumerate(looks)]
            except StoreGone as error:
                raise StepError(str(error)) from error
            return [msgspec.json.decode(text, type=kind) for text in found]

        return exchange

    def clock_offset_s(self) -> float:
        """What this rank's ``time.perf_counter()`` is behind rank 0's; every rank calls it.

        Hosts' clocks are not compared: of some messages to rank 0 and back the fastest tells, right to half
        the time it took.
        """
        fastest_s, offset_s = math.inf, 0.0
        for other in range(1, self.n_ranks):
            self.position.waits_for = other if self.rank == 0 else 0
            for _ in range(N_PINGS if self.rank in (0, other) else 0):
                began_s, told = time.perf_counter(), torch.zeros(1, dtype=torch.float64, device="cpu")
                if self.rank == 0:
                    self.control.recv(told, other).wait(FOREVER)
                    self.control.send(told.fill_(time.perf_counter()), other).wait(FOREVER)
                    continue
                self.control.send(told, 0).wait(FOREVER)
                self.control.recv(told, 0).wait(FOREVER)
                ended_s = time.perf_counter()
                if ended_s - began_s < fastest_s:
                    fastest_s, offset_s = ended_s - began_s, told.item() - (began_s + ended_s) / 2
        return offset_s
