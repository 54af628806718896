"""What a message takes between two ranks that compute on host processors meanwhile, as a pipeline's do.

Which ranks are measured, and what becomes of the figures, is left to ``probe``.

Both ranks compute and pass tokens on. With one token in all, who waits for it has nothing else to do, as a
rank in a bubble; a token carries the time it was sent at, and the mean of both ways does without a common
clock. With two tokens each nobody waits; the process's CPU time beside that of its work is then what a
message sent and one received take.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Exchange", "exchange"]

_SMALL, _LARGE = 1 << 16, 1 << 22
_TURNS = 10
_ROUNDS = 4
_WIDTH = 320
_TOUCHED = 1 << 23
"""Values that the work goes over, twice: as after a stage, messages find nothing of theirs in any cache."""


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds of a message: on its way, each byte of it; a core's at each end, for each byte."""

    latency_s: float
    s_per_byte: float
    host_s: float
    host_s_per_byte: float


def exchange(peer: int) -> Exchange:
    """Of messages with another rank of the default group, which calls it at the same time. In two seconds."""
    work, leads = _work(), dist.get_rank() < peer
    ways: dict[int, list[float]] = {_SMALL: [], _LARGE: []}
    beside: dict[int, list[float]] = {_SMALL: [], _LARGE: []}
    for _ in range(_ROUNDS):
        for size in (_SMALL, _LARGE):
            _meet(peer)
            ways[size] += _ways_s(work, peer, size, leads)
            _meet(peer)
            beside[size].append(_beside_s(work, peer, size))
    # others on the machine make ways longer, never shorter
    mine = [statistics.quantiles(ways[size], n=4)[0] for size in (_SMALL, _LARGE)]
    latency_s, per_byte = _line(*((a + b) / 2 for a, b in zip(mine, _swapped(mine, peer), strict=True)))
    host_s, host_per_byte = _line(*(statistics.median(beside[size]) for size in (_SMALL, _LARGE)))
    # a turn sends a message and receives one
    return Exchange(latency_s, per_byte, host_s / 2, host_per_byte / 2)


def _ways_s(work: Callable[[], object], peer: int, n_bytes: int, leads: bool) -> list[float]:
    """Seconds that each token was under way to this rank, by the sender's clock and this one's."""
    found: list[float] = []
    sent: list[Any] = []

    def pass_on() -> None:
        work()
        token = _token(n_bytes)
        token[0] = time.perf_counter()
        sent.append(dist.isend(token, peer))

    if leads:
        pass_on()
    for turn in range(_TURNS):
        token = _token(n_bytes)
        dist.recv(token, peer)
        found.append(time.perf_counter() - float(token[0]))
        if turn + 1 < _TURNS or not leads:
            pass_on()
    for message in sent:
        message.wait()
    return found[1:]


def _beside_s(work: Callable[[], object], peer: int, n_bytes: int) -> float:
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
        leaving.append(dist.isend(_token(n_bytes), peer))
        coming.append(dist.irecv(_token(n_bytes), peer))
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


def _line(small_s: float, large_s: float) -> tuple[float, float]:
    """Through the seconds at both sizes: at none, and for each byte."""
    slope = max(0.0, large_s - small_s) / (_LARGE - _SMALL)
    return max(0.0, small_s - slope * _SMALL), slope


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
