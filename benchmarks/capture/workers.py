"""One forked process per model, with limits of time and memory: nothing that a model does can hurt the walk.

What a process does is left to ``trial``.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

__all__ = ["OVER", "prepare", "run", "warm"]

OVER = "over the limit"
"""How ``died`` begins where time was over."""

MEMORY_BYTES = 12 * 2**30
"""Address space of one process; a model that wants more fails alone."""
_PATIENCE = 6
"""By how much a process that others keep from the processor may be longer at it than its limit."""


def run(
    work: Callable[[Any, Callable[[dict[str, Any]], None]], None],
    items: Sequence[Any],
    *,
    n_jobs: int,
    limit_s: float,
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields (item, what ``work(item, report)`` reported) as items finish, in any order.

    ``work`` may report several times; the dicts are merged, so what was reported before a crash or the limit
    is kept. The limit is one of processor time, which is the same on a busy machine. An exception, a crash or
    the limit adds ``died``.
    """
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(items))
    active: dict[Connection, tuple[Any, Any, float, dict[str, Any]]] = {}
    gc.collect()
    gc.freeze()
    while waiting or active:
        while waiting and len(active) < n_jobs:
            item = waiting.pop()
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(work, item, send, limit_s), daemon=True)
            process.start()
            send.close()
            active[receive] = (item, process, time.monotonic() + _PATIENCE * limit_s, {})
        ready = wait(list(active), timeout=1.0)
        for receive in list(active):
            item, process, deadline, result = active[receive]
            is_over = False
            if receive in ready:
                try:
                    result.update(receive.recv())
                except EOFError:
                    is_over = True
            elif time.monotonic() > deadline:
                process.kill()
                result["died"] = f"{OVER} of {limit_s:g} s"
                is_over = True
            if is_over:
                process.join()
                if process.exitcode == -signal.SIGXCPU:
                    result["died"] = f"{OVER} of {limit_s:g} s"
                if process.exitcode and "died" not in result:
                    result["died"] = f"exit code {process.exitcode}"
                del active[receive]
                receive.close()
                yield item, result


def _child(work: Callable[..., None], item: Any, send: Connection, limit_s: float) -> None:
    seconds = math.ceil(limit_s)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        work(item, send.send)
    except BaseException as error:
        lines = traceback.format_exception(error)
        send.send(
            {"died": f"{type(error).__name__}: {str(error)[:300]}", "traceback": "".join(lines)[-3000:]}
        )
    finally:
        send.close()


def prepare() -> None:
    """Imports once what every forked process needs, and quiets what would drown the table."""
    import torch
    import torch.distributed.pipelining
    import torch.export
    import transformers

    torch.set_num_threads(1)
    torch.export.export(*warm())
    transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=0, hidden_size=32, vocab_size=8))
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")


def warm() -> tuple[Any, tuple[Any, ...]]:
    """Has autopipe and torch load what they do on first use, which is no part of a model's time.

    Returns the small model that was cut for it, and its arguments.
    """
    import torch

    import autopipe

    small = torch.nn.Sequential(torch.nn.Conv1d(2, 2, 2), torch.nn.ReLU(), torch.nn.Conv1d(2, 2, 2))
    given = (torch.zeros(2, 2, 8),)
    autopipe.split(small, 2, given, costs="estimated")
    return small, given
