"""Keeps the machine as busy as the other ranks of a pipeline will while something is timed; tells its pace.

What they work on is left to the caller.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
import torch.distributed as dist

from .. import accelerator

__all__ = ["busy", "pace", "places"]


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


@contextlib.contextmanager
def busy(work: Callable[[], object], n_peers: int, device: torch.device) -> Iterator[None]:
    """Within it ``n_peers`` copies of this process repeat ``work``; they are ended on the way out.

    Ranks on one machine share its memory bandwidth, last-level cache and clock budget, so an op takes
    longer in a pipeline than alone. The peers are forks, which have the model already; where that cannot be
    had (another device than the CPU, a platform without a safe fork) nothing is started.
    """
    peers: list[int] = []
    try:
        if device.type == "cpu" and sys.platform == "linux" and not accelerator.has_begun():
            for _ in range(n_peers):
                peers.append(_fork(work))
        yield
    finally:
        for pid in peers:
            os.kill(pid, signal.SIGKILL)
        for pid in peers:
            os.waitpid(pid, 0)


def _fork(work: Callable[[], object]) -> int:
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
            _repeat(work, parent)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _repeat(work: Callable[[], object], parent: int) -> NoReturn:
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
    finally:
        os._exit(0)


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
