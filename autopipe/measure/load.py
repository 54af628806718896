"""Keeps the machine as busy as the other ranks of a pipeline will, while something is being timed.

What they work on is left to the caller.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator

import torch

__all__ = ["busy"]


@contextlib.contextmanager
def busy(work: Callable[[], object], n_peers: int, device: torch.device) -> Iterator[None]:
    """Within it ``n_peers`` copies of this process repeat ``work``; they are ended on the way out.

    Ranks on one machine share its memory bandwidth, last-level cache and clock budget, so an op takes
    longer in a pipeline than alone. The peers are forks, which have the model already; where that cannot be
    had (another device than the CPU, a platform without a safe fork) nothing is started.
    """
    peers: list[int] = []
    try:
        if device.type == "cpu" and sys.platform == "linux" and not torch.cuda.is_initialized():
            for _ in range(n_peers):
                peers.append(_fork(work))
        yield
    finally:
        for pid in peers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _fork(work: Callable[[], object]) -> int:
    with warnings.catch_warnings():
        # the child runs kernels on one thread and touches no lock that another thread could hold
        warnings.filterwarnings("ignore", "This process.*is multi-threaded", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        while os.getppid() != 1:
            work()
    finally:
        os._exit(0)
