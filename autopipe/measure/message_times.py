"""What a message takes between two ranks that compute on host processors meanwhile, as a pipeline's do.

Which ranks are measured, and what becomes of the figures, is left to ``probe``.

Both ranks compute and pass tokens on. With one token in all, who waits for it has nothing else to do, as a
rank in a bubble; a token carries the time it was sent at, and the mean of both ways does without a common
clock. With two tokens each nobody waits; the process's CPU time beside that of its work is then what a
message sent and one received take. Tokens go both ways that messages of a pipeline go: by the communicator,
and between ranks of a host past it, by a link of their own.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CostError
from ..host_link import Link

__all__ = ["Exchange", "exchange"]

_TINY, _SMALL, _LARGE = 1 << 12, 1 << 16, 1 << 22
_CONNECTS_S = 10.0
_LONGEST = 108
"""Bytes of a socket's name, at most."""
_TURNS = 10
_ROUNDS = 4
_WIDTH = 320
_TOUCHED = 1 << 23
"""Values that the work goes over, twice: as after a stage, messages find nothing of theirs in any cache."""


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds of a message: on its way, each byte of it; a core's at each end, for each byte.

    What begins with ``direct`` is of those below ``direct_below_bytes``, which go past the communicator.
    """

    latency_s: float
    s_per_byte: float
    host_s: float
    host_s_per_byte: float
    direct_s: float = 0.0
    direct_s_per_byte: float = 0.0
    direct_host_s: float = 0.0
    direct_host_s_per_byte: float = 0.0
    direct_below_bytes: int = 0


def exchange(peer: int) -> Exchange:
    """Of messages with another rank of the default group, which calls it at the same time. In two seconds."""
    work, leads = _work(), dist.get_rank() < peer
    with _connected(peer, leads) as link:
        kinds: list[tuple[_Carrier, int]] = [(_Group(peer), _SMALL), (_Group(peer), _LARGE)]
        if link is not None:
            kinds += [(link, size) for size in (_TINY, _LARGE) if size < link.below_bytes]
        ways: list[list[float]] = [[] for _ in kinds]
        beside: list[list[float]] = [[] for _ in kinds]
        for _ in range(_ROUNDS):
            for x, (carrier, size) in enumerate(kinds):
                _meet(peer)
                ways[x] += _ways_s(work, carrier, size, leads)
                _meet(peer)
                beside[x].append(_beside_s(work, carrier, size))
    # others on the machine make ways longer, never shorter
    mine = [statistics.quantiles(found, n=4)[0] for found in ways]
    both = [(a + b) / 2 for a, b in zip(mine, _swapped(mine, peer), strict=True)]
    # a turn sends a message and receives one; what is left beside nearly nothing may be less than that
    working = [max(0.0, statistics.median(found) / 2) for found in beside]
    found = Exchange(*_line(both[:2], _SMALL), *_line(working[:2], _SMALL))
    if link is None:
        return found
    ways_s, works_s = _line(both[2:], _TINY), _line(working[2:], _TINY)
    return dataclasses.replace(
        found,
        direct_s=ways_s[0],
        direct_s_per_byte=ways_s[1],
        direct_host_s=works_s[0],
        direct_host_s_per_byte=works_s[1],
        direct_below_bytes=link.below_bytes,
    )


class _Carrier(Protocol):
    """Takes tokens to another rank and brings its own; what is returned can be waited for."""

    def send(self, token: Tensor) -> Any: ...
    def recv(self, token: Tensor) -> Any: ...


class _Group:
    """The default group."""

    def __init__(self, peer: int) -> None:
        self._peer = peer

    def send(self, token: Tensor) -> Any:
        return dist.isend(token, self._peer)

    def recv(self, token: Tensor) -> Any:
        return dist.irecv(token, self._peer)


@contextlib.contextmanager
def _connected(peer: int, leads: bool) -> Iterator[Link | None]:
    """A link to the other rank; None on both where they can have none: two hosts, another system."""
    with contextlib.ExitStack() as held:
        mine: socket.socket | None = None
        if hasattr(socket, "AF_UNIX"):
            mine = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            mine.settimeout(_CONNECTS_S)
        path = held.enter_context(tempfile.TemporaryDirectory(prefix="autopipe-")) + "/probed"
        with contextlib.suppress(OSError):
            if mine is not None and leads:
                mine.bind(path)
                mine.listen(1)
        told = _said(path if leads else "", peer)
        is_there = mine is not None
        try:
            if mine is not None and not leads:
                mine.connect(told)
        except OSError:
            is_there = False
        if not leads:
            _swapped([float(is_there)], peer)
            yield _agreed(mine) if is_there and mine is not None else None
        elif _swapped([0.0], peer)[0] and mine is not None:
            yield _agreed(held.enter_context(mine.accept()[0]))
        else:
            yield None


def _agreed(connection: socket.socket) -> Link:
    """A link over a connection, whose other end makes one too."""
    connection.settimeout(None)
    link = Link(connection)
    if not (link.agree(_CONNECTS_S) and link.agree(_CONNECTS_S)):
        raise CostError(
            "the rank that messages are measured with has connected and says nothing; see its log"
        )
    return link


def _said(text: str, peer: int) -> str:
    """What the other rank says, who hears what this one does."""
    row = [float(x) for x in text.encode()[:_LONGEST].ljust(_LONGEST, b"\0")]
    return bytes(int(x) for x in _swapped(row, peer)).rstrip(b"\0").decode()


def _ways_s(work: Callable[[], object], carrier: _Carrier, n_bytes: int, leads: bool) -> list[float]:
    """Seconds that each token was under way to this rank, by the sender's clock and this one's."""
    found: list[float] = []
    sent: list[Any] = []

    def pass_on() -> None:
        work()
        token = _token(n_bytes)
        token[0] = time.perf_counter()
        sent.append(carrier.send(token))

    if leads:
        pass_on()
    for turn in range(_TURNS):
        token = _token(n_bytes)
        carrier.recv(token).wait()
        found.append(time.perf_counter() - float(token[0]))
        if turn + 1 < _TURNS or not leads:
            pass_on()
    for message in sent:
        message.wait()
    return found[1:]


def _beside_s(work: Callable[[], object], carrier: _Carrier, n_bytes: int) -> float:
    """CPU time of a turn beside its work, the communicator's threads included, where nobody waits."""
    held, working_s, start_s = 2, 0.0, time.process_time()
    leaving: collections.deque[Any] = collections.deque()
    coming: collections.deque[Any] = collections.deque()
    for _ in range(_TURNS):
        if held:
            held -= 1
        else:
            coming.popleft().wait()
        working_s -= time.thread_time()
        work()
        working_s += time.thread_time()
        leaving.append(carrier.send(_token(n_bytes)))
        coming.append(carrier.recv(_token(n_bytes)))
        if len(leaving) > 4:
            leaving.popleft().wait()
    for message in (*coming, *leaving):
        message.wait()
    return (time.process_time() - start_s - working_s) / _TURNS


def _token(n_bytes: int) -> Tensor:
    """Memory for a token. What is in it does not matter beside its first number, the time it leaves at."""
    return torch.empty(n_bytes // 8, dtype=torch.float64, device="cpu")


def _swapped(mine: list[float], peer: int) -> list[float]:
    """What the other rank found, which gets what this one did."""
    theirs = torch.empty(len(mine), dtype=torch.float64, device="cpu")
    coming = dist.irecv(theirs, peer)
    dist.send(torch.tensor(mine, dtype=torch.float64, device="cpu"), peer)
    coming.wait()  # type: ignore[union-attr]
    return [float(x) for x in theirs]


def _line(seconds: Sequence[float], small: int) -> tuple[float, float]:
    """Through the seconds at a small size and the large one, if it is there: of none, and of each byte."""
    small_s, large_s = seconds[0], seconds[-1]
    slope = max(0.0, large_s - small_s) / (_LARGE - small)
    return max(0.0, small_s - slope * small), slope


def _work() -> Callable[[], object]:
    """Some milliseconds of what models do: products, and a walk over more than the caches hold."""
    a, b = torch.randn(_WIDTH, _WIDTH, device="cpu"), torch.randn(_WIDTH, _WIDTH, device="cpu")
    x, y = torch.zeros(_TOUCHED, device="cpu"), torch.zeros(_TOUCHED, device="cpu")

    def work() -> None:
        torch.mm(a, b)
        torch.add(x, 1.0, out=y)

    for _ in range(3):
        work()
    return work


def _meet(peer: int) -> None:
    """Until both ranks are here."""
    _swapped([0.0], peer)
