"""Does the parts of a save or load in several threads: checksums, copies and system calls run side by side.

What the parts are is left to ``safetensors_file``, ``saving`` and ``loading``.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Iterable
from typing import TypeVar

__all__ = ["in_threads", "threads_for"]

T = TypeVar("T")
MOST = 4
"""More threads than this wait for the disk, or for memory."""
EACH_BYTES = 16 << 20
"""What is worth a thread of its own."""


def threads_for(n_bytes: int) -> int:
    """How many threads to read, write or copy so many bytes in: 1 means the caller's own."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST, mine, n_bytes // EACH_BYTES))


def in_threads(jobs: Iterable[Callable[[], T]], n_threads: int) -> list[T]:
    """What the ``jobs`` return, in their order; at most ``n_threads`` are under way at once.

    They are drawn one by one in the caller's thread, none before there is a thread for it: what drawing one
    takes in memory is held so many times. Raises what the first to fail raises, after those begun have ended.
    """
    if n_threads == 1:
        return [job() for job in jobs]
    every: list[concurrent.futures.Future[T]] = []
    with concurrent.futures.ThreadPoolExecutor(n_threads, thread_name_prefix="autopipe files") as pool:
        going: set[concurrent.futures.Future[T]] = set()
        for job in jobs:
            every.append(pool.submit(job))
            going.add(every[-1])
            if len(going) >= n_threads:
                done, going = concurrent.futures.wait(going, return_when="FIRST_COMPLETED")
                for each in done:
                    each.result()
    return [each.result() for each in every]
