"""One rank decides, all ranks hold the same answer: no two ranks ever run different plans.

A process that a launcher started as one of several, and that is in no process group yet, joins theirs here.

What is decided is left to the caller, how ranks talk to ``runtime.wire.store_messages``.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from .. import errors
from ..errors import AutopipeError, InputError, PlanError, StepError
from ..runtime.wire.ended import say_ended, say_not_joined
from ..runtime.wire.side_thread import in_side_thread
from ..runtime.wire.store_messages import Talk, call_of_all

__all__ = ["decide_once", "in_group", "join_group", "make_alike", "one_call"]

_logger = logging.getLogger(__name__)

T = TypeVar("T")


def join_group(limit_s: float | None = None) -> None:
    """Be in the process group of all ranks where a launcher (``torchrun``) started several and none is up.

    Takes this process's accelerator, numbered by ``LOCAL_RANK``, where the machine has some, and leaves the
    group when the process ends. Does nothing in a single process, or when the script made the group itself.
    Raises :class:`InputError` when the launcher's environment is not complete, :class:`StepError` where the
    others do not come within ``limit_s``, by default what torch waits.
    """
    n_ranks = os.environ.get("WORLD_SIZE", "1")
    if not dist.is_available() or dist.is_initialized() or n_ranks == "1":
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(
            f"WORLD_SIZE is {n_ranks} and this process is in no process group, but {', '.join(missing)} "
            "is not set, so it cannot find the others; start the script with torchrun, write "
            "torch.distributed.init_process_group(...) with your cluster's addresses before split(), or "
            "unset WORLD_SIZE where this process is alone"
        )
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InputError(
            "this is a worker process that a rank started (of a DataLoader, say), and it runs the whole "
            "script again on its way up, where it would take that rank's place; put the script's code under "
            "`if __name__ == '__main__':`"
        )
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT"):
        _check_number(name, os.environ.get(name, "0"))
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        backend = "gloo"
    else:
        number, n_here = int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.device_count()
        if number >= n_here:
            raise InputError(
                f"LOCAL_RANK is {number}, but this machine has {n_here} {device.type} devices; start at most "
                f"{n_here} processes here (torchrun --nproc-per-node {n_here})"
            )
        torch.accelerator.set_device_index(number)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"
        device = torch.device(device.type, number)
    began_s = time.monotonic()

    def check() -> None:
        waited_s = time.monotonic() - began_s
        if limit_s is not None and waited_s > limit_s:
            raise StepError(f"{_NOT_JOINED.format(n_ranks)}: waited {waited_s:.1f} s (stall_limit_s)")

    try:
        in_side_thread(lambda: _join(backend), "autopipe joining", check)
    except (RuntimeError, ValueError) as error:
        raise StepError(f"{_NOT_JOINED.format(n_ranks)}: {error}") from error
    atexit.register(_leave_group)
    rank, where = dist.get_rank(), device or "cpu"
    _logger.info("joined the launcher's %s ranks as rank %d, on %s with %s", n_ranks, rank, where, backend)


def _check_number(name: str, text: str) -> None:
    if not text.isdecimal():
        raise InputError(
            f"{name} is {text!r} in this process's environment; a launcher (torchrun) sets a whole number"
        )


_NOT_JOINED = (
    "not all {} ranks came to the process group, or who hosts its store (rank 0, or the launcher) is gone or "
    "stopped; look at their logs"
)


def _join(backend: str) -> None:
    """Make the group; of a restarted job not in its first start's store, which has dead ranks' addresses."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # several agents count their own restarts only, so that ranks could look for one another in two places
    is_first = attempt == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1"
    store, rank, n_ranks = next(rendezvous("env://"))
    own = dist.PrefixStore("default_pg" if is_first else f"attempt {attempt}", store)  # type: ignore[attr-defined]
    try:
        dist.init_process_group(backend, store=own, rank=rank, world_size=n_ranks)
    except Exception as error:
        say_not_joined(own, rank, error)  # others may be through, and wait for this one
        raise


def _leave_group() -> None:
    say_ended()
    if dist.is_initialized():
        dist.destroy_process_group()


def in_group() -> bool:
    """Whether a process group of more than one rank is up."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def one_call(name: str) -> contextlib.AbstractContextManager[None]:
    """Within it every rank makes the call ``name``: what keeps one alone from it the others hear at once."""
    return call_of_all(name) if in_group() else contextlib.nullcontext()


def make_alike(
    what: str,
    make: Callable[[], T],
    digest: Callable[[T], str],
    limit_s: float | None,
    asked: Mapping[str, str] | None = None,
) -> T:
    """Run ``make`` on every rank and check that the results are alike, and what ranks ``asked`` for.

    Where one rank fails all raise: that rank its own error, the others one that names it. Raises
    :class:`PlanError` on every rank when digests differ, or what was asked, which it names;
    :class:`StepError` when a rank is gone: silent for ``limit_s``.
    """
    if not in_group():
        return make()
    made: T | None = None
    failure: Exception | None = None
    mine: tuple[str, dict[str, str]]
    with Talk(limit_s) as talk:
        try:
            made = make()
            mine = ("made", {**(asked or {}), what: digest(made)})
        except Exception as error:
            # the peers wait for the word below, so they hear of the failure before it is raised
            failure = error
            mine = ("failed", {what: f"{type(error).__name__}: {error}"})
        told = talk.gather("alike", json.dumps(mine), f"ranks agree on {what}")
    everyone = [tuple(json.loads(text)) for text in told]
    if failure is not None:
        raise failure
    failed = [
        f"rank {rank} failed: {said[what]}"
        for rank, (state, said) in enumerate(everyone)
        if state == "failed"
    ]
    if failed:
        raise PlanError("; ".join(failed))
    first, *others = (said for _, said in everyone)
    for name in first:
        if odd := [
            f"rank {r} has {said[name]}" for r, said in enumerate(others, 1) if said[name] != first[name]
        ]:
            raise PlanError(
                f"ranks disagree on {name}: rank 0 has {first[name]}, {', '.join(odd)}; give every rank the "
                + ("same model code, configuration and example shapes" if name == what else "same")
            )
    return made  # type: ignore[return-value]


def decide_once(
    decide: Callable[[], T],
    to_text: Callable[[T], str],
    from_text: Callable[[str], T],
    limit_s: float | None,
) -> T:
    """Run ``decide`` on rank 0 and give its result, as text, to all.

    An error there is raised on every rank. Raises :class:`StepError` where rank 0 is silent for ``limit_s``.
    """
    if not in_group():
        return decide()
    with Talk(limit_s) as talk:
        if talk.rank != 0:
            state, text = json.loads(talk.hear("decided", 0, "rank 0 decides"))
            talk.settle("decided")
            if state != "decided":
                raise getattr(errors, state, PlanError)(text)
            return from_text(text)
        try:
            made = decide()
            talk.tell("decided", json.dumps(("decided", to_text(made))))
        except Exception as error:
            # the peers wait for the word, so they hear of the failure before it is raised
            is_ours = isinstance(error, AutopipeError)
            told = (
                (type(error).__name__, str(error)) if is_ours else ("PlanError", f"rank 0 failed: {error!r}")
            )
            talk.tell("decided", json.dumps(told))
            talk.settle("decided")
            raise
        talk.settle("decided")
        return made
