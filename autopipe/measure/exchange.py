"""What a message takes between two ranks that compute on host processors meanwhile, as a pipeline's do.

Which ranks are measured, and what becomes of the figures, is left to ``probe``.

Two ranks pass tokens to and fro. Each takes one, computes, and sends it on; so with two tokens in all, each
waits for every message the whole time it is under way, as 1F1B does where stages are equal. With four nobody
waits; the process's CPU time beside that of its work is then what a message sent and one received take.
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

__all__ = ["Exchange", "exchange"]

_SMALL, _LARGE = 1 << 16, 1 << 22
_TURNS = 12
_ROUNDS = 3
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
    work = _work()
    wall: dict[tuple[int, int], list[float]] = collections.defaultdict(list)
    cpu: dict[tuple[int, int], list[float]] = collections.defaultdict(list)
    for _ in range(_ROUNDS):
        for key in ((0, _SMALL), (2, _SMALL), (4, _SMALL), (2, _LARGE), (4, _LARGE)):
            _meet(peer)
            turns, beside_s = _turns(work, peer, *key)
            wall[key] += turns
            cpu[key].append(beside_s / _TURNS)
    # others on the machine make turns longer, never shorter
    turn = {key: statistics.quantiles(seconds, n=4)[0] for key, seconds in wall.items()}
    busy = {key: min(seconds) for key, seconds in cpu.items()}
    none = 0, _SMALL
    latency_s, per_byte = _line(*(turn[2, size] - turn[none] for size in (_SMALL, _LARGE)))
    host_s, host_per_byte = _line(*(busy[4, size] for size in (_SMALL, _LARGE)))
    # a turn sends a message and receives one
    return Exchange(latency_s, per_byte, host_s / 2, host_per_byte / 2)


def _turns(work: Callable[[], object], peer: int, n_tokens: int, n_bytes: int) -> tuple[list[float], float]:
    """Seconds of each turn, the first ones left out; of the work alone where there are no tokens.

    And the CPU time of all turns beside their work, the communicator's threads included.
    """
    held, ends = n_tokens // 2, list[float]()
    start_s, working_s = time.process_time(), 0.0
    leaving: collections.deque[Any] = collections.deque()
    coming: collections.deque[Any] = collections.deque()
    for _ in range(_TURNS):
        if held:
            held -= 1
        elif n_tokens:
            coming.popleft().wait()
        working_s -= time.thread_time()
        work()
        working_s += time.thread_time()
        if n_tokens:
            leaving.append(dist.isend(torch.empty(n_bytes, dtype=torch.uint8, device="cpu"), peer))
            coming.append(dist.irecv(torch.empty(n_bytes, dtype=torch.uint8, device="cpu"), peer))
            if len(leaving) > n_tokens:
                leaving.popleft().wait()
        ends.append(time.perf_counter())
    for message in (*coming, *leaving):
        message.wait()
    beside_s = time.process_time() - start_s - working_s
    skipped = max(2, n_tokens)
    turns = [later - earlier for earlier, later in zip(ends[skipped:], ends[skipped + 1 :], strict=False)]
    return turns, beside_s


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
    token = torch.zeros(1, device="cpu")
    coming = dist.irecv(torch.zeros(1, device="cpu"), peer)
    dist.isend(token, peer).wait()  # type: ignore[union-attr]
    coming.wait()  # type: ignore[union-attr]
