"""Keeps the cores as busy as the other ranks of a pipeline will while something is timed; tells their pace.

What they work on is left to the caller.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import mmap
import os
import signal
import statistics
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
import torch.distributed as dist

from .. import accelerator

__all__ = ["Peers", "busy", "pace", "places"]


def places() -> int:
    """How many ranks like this process can compute at once on this host's CPU."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, mine // torch.get_num_threads())


def pace() -> float:
    """Seconds of a fixed piece of work on the processor, all ranks of a job at it at once: of the slowest.

    All ranks call it together. It tells of what no count of CPU time shows: cores of a virtual machine become
    slower while another guest works on their other halves.
    """
    a, b, over = (torch.ones(n, device="cpu") for n in ((320, 320), (320, 320), (1 << 20,)))
    n_ranks = dist.get_world_size() if dist.is_initialized() else 1
    seconds = []
    for _ in range(9):
        if n_ranks > 1:
            dist.barrier()
        start = time.perf_counter()
        for _ in range(6):
            a @ b
            over.mul_(1.0)
        seconds.append(time.perf_counter() - start)
    every = [torch.zeros(1, dtype=torch.float64, device="cpu") for _ in range(n_ranks)]
    every[0] += statistics.median(seconds)
    if n_ranks > 1:
        dist.all_gather(every, every[0].clone())
    return max(float(s) for s in every)


class Peers:
    """Processes that repeat a piece of work until :func:`busy` ends them, and rest when they are asked to."""

    def __init__(self, n_peers: int) -> None:
        # whether all are to rest, what is asked of them, then whether each one rests: memory that forks share
        self._said = memoryview(mmap.mmap(-1, _NUMBER_BYTES * (2 + n_peers))).cast("i")
        self._parent = os.getpid()
        self.pids: list[int] = []

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Within it no peer works: each first ends what it is at, which is not waited for without end."""
        self._said[0], most_s = 1, time.monotonic() + _RESTS_WITHIN_S
        try:
            while time.monotonic() < most_s and not all(map(self._rests, range(len(self.pids)))):
                time.sleep(_LOOKS_EVERY_S)
            yield
        finally:
            self._said[0] = 0

    @property
    def asked(self) -> int:
        """What is asked of all, which their work makes something of; 0 at first."""
        return self._said[1]

    def ask(self, what: int) -> None:
        """Ask something else of all: they are at it when this returns."""
        with self.resting():
            self._said[1] = what

    def _rests(self, number: int) -> bool:
        """Whether a peer rests, or has ended and only is to be waited for."""
        ended = os.waitid(os.P_PID, self.pids[number], os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return bool(self._said[2 + number]) or ended is not None

    def rest(self, number: int) -> None:
        """A peer's part, between two pieces of its work: waits as long as it is asked to rest."""
        while self._said[0]:
            self._said[2 + number] = 1
            if os.getppid() != self._parent:
                return
            time.sleep(_LOOKS_EVERY_S)
        self._said[2 + number] = 0


_NUMBER_BYTES = struct.calcsize("i")
_LOOKS_EVERY_S = 1e-3
_RESTS_WITHIN_S = 10.0


@contextlib.contextmanager
def busy(work: Callable[[int, int], object], n_peers: int, device: torch.device) -> Iterator[Peers]:
    """Within it ``n_peers`` copies of this process repeat ``work``; they are ended on the way out.

    It is given the number of the copy, and what is :attr:`Peers.asked` of all.

    Ranks on one machine share its memory bandwidth, last-level cache and clock budget, so an op takes
    longer in a pipeline than alone. The peers are forks, which have the model already; where that cannot be
    had (another device than the CPU, a platform without a safe fork) nothing is started.
    """
    peers = Peers(n_peers)
    try:
        if device.type == "cpu" and sys.platform == "linux" and not accelerator.has_begun():
            for number in range(n_peers):
                peers.pids.append(_fork(work, peers, number))
        yield peers
    finally:
        for pid in peers.pids:
            os.kill(pid, signal.SIGKILL)
        for pid in peers.pids:
            os.waitpid(pid, 0)


def _fork(work: Callable[[int, int], object], peers: Peers, number: int) -> int:
    parent = os.getpid()
    # A signal's Python handler belongs to the parent (a kernel, a launcher): it must not run in the child,
    # so none is delivered before the child has dropped them all.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        with warnings.catch_warnings():
            # the child runs kernels on one thread and touches no lock that another thread could hold
            warnings.filterwarnings("ignore", "This process.*is multi-threaded", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _repeat(lambda: work(number, peers.asked), functools.partial(peers.rest, number), parent)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _repeat(work: Callable[[], object], rest: Callable[[], object], parent: int) -> NoReturn:
    """The child: works in silence until its parent is gone, and leaves without any of Python's clean-up.

    What it inherited (sockets of process groups and kernels, open files) is never read, written, flushed or
    closed by it: no finalizer runs, as nothing is collected, and nothing printed reaches the parent's.
    """
    try:
        gc.disable()
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        torch.set_num_threads(1)
        sys.stdout = sys.stderr = io.StringIO()
        while os.getppid() == parent:
            work()
            rest()
    finally:
        os._exit(0)


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
