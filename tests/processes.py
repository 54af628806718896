"""Starts a script on several ranks over loopback and ends them all, whatever happens."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from unittest import mock

import torch.distributed as dist

__all__ = ["Rank", "children", "finish", "free_port", "run_ranks", "start"]

ROOT = pathlib.Path(__file__).parents[1]
PATHS = (ROOT, ROOT / "tests", ROOT / "tests" / "runtime", ROOT / "tests" / "accelerator")

# whoever asks for a GPU before the fork must not open it: what is forked after that cannot
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["warmed"])
_MOST_START_S = 200.0


def children() -> set[str]:
    """The processes that this one has started and that are not gone."""
    found = set()
    for entry in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may end meanwhile
            parent = entry.read_text().rpartition(")")[2].split()[1]
            found |= {entry.parent.name} if int(parent) == os.getpid() else set()
    return found


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens at."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _job(n_ranks: int, is_hosted_by_rank_0: bool) -> tuple[dict[str, str], dist.Store | None]:
    """What the environment says of a job, and its store where this process hosts it, as torchrun does."""
    job = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(n_ranks)}
    if is_hosted_by_rank_0:
        return {**job, "MASTER_PORT": str(free_port())}, None
    # at an IPv4 address: of each peer with an IPv6 one it asks a name server, and stands still meanwhile
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    port, number = listening.getsockname()[1], listening.detach()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=number)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    return {**job, **agent, "MASTER_PORT": str(store.port)}, store


@functools.cache
def _wait_for(server: int) -> None:
    """Wait once until a fork server forks, in no test's time: a busy machine may take a minute."""
    limit = signal.setitimer(signal.ITIMER_REAL, 0)  # that of pytest-timeout
    if any(limit):  # a capture that never ends ends the test too
        signal.setitimer(signal.ITIMER_REAL, _MOST_START_S)
    try:
        first = _FORKS.Process(target=os.getpid)
        first.start()
        first.join()
    finally:
        signal.setitimer(signal.ITIMER_REAL, *limit)


class Rank:
    """A script in a process forked from one that holds torch already, which takes a tenth of starting anew.

    Like a ``subprocess.Popen`` whose errors go with its output.
    """

    def __init__(
        self,
        script: pathlib.Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        store: dist.Store | None,
    ) -> None:
        self._store = store  # lives as long as a rank may ask it, whichever of them ends first
        handle, self._output = tempfile.mkstemp()
        os.close(handle)
        with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(map(str, PATHS))}):
            forkserver.ensure_running()  # it finds what it is to hold where this process does
        _wait_for(forkserver._forkserver._forkserver_pid)
        self._process = _FORKS.Process(
            target=_become, args=(str(script), list(arguments), dict(environment), self._output)
        )
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Its output, once it has ended; raises ``subprocess.TimeoutExpired``."""
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired(self._output, timeout or 0)
        return pathlib.Path(self._output).read_text(errors="replace"), None

    def send_signal(self, number: int) -> None:
        if self._process.is_alive():
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill it and all that it started, and forget its output."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()
        self._process.close()
        pathlib.Path(self._output).unlink()


def _become(script: str, arguments: list[str], environment: dict[str, str], output: str) -> None:
    """Go on as ``python script arguments`` would."""
    gc.freeze()  # what was there before the fork is shared as long as nobody searches it for garbage
    os.setsid()
    into = os.open(output, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(into, number)
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [script, *arguments]
    sys.path[:0] = [str(pathlib.Path(script).parent), *environment["PYTHONPATH"].split(os.pathsep)]
    try:
        sys.modules["warmed"].check()
        runpy.run_path(script, run_name="__main__")
    except Exception as error:
        # as an interpreter that ends by it does, and multiprocessing does not
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    finally:
        for thread in threading.enumerate():  # as an interpreter that ends does, and in this order
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
        atexit._run_exitfuncs()


def start(
    script: pathlib.Path,
    n_ranks: int,
    *args: object,
    environment: Mapping[str, str] | None = None,
    is_hosted_by_rank_0: bool = False,
) -> list[Rank]:
    """The processes of all ranks, with torchrun's environment and what ``environment`` adds.

    The job's store is this process's, as it is torchrun's, or rank 0's, which must then leave last. With no
    ranks it is one process alone, of no job.
    """
    job, store = _job(n_ranks, is_hosted_by_rank_0)
    common = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RES_OPTIONS": "timeout:1 attempts:1",  # each connection to the store asks a name server, unheard
        "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
        **(environment or {}),
    }
    ranks = [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(n_ranks)] or [{}]
    return [Rank(script, [*map(str, args)], {**common, **rank}, store) for rank in ranks]


def finish(ranks: Sequence[Rank], timeout_s: float) -> list[tuple[int, str]]:
    """(exit code, output) of each; those that are not done in time are ended, and say so."""
    deadline = time.monotonic() + timeout_s
    results = []
    try:
        for rank in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.communicate(max(0.1, deadline - time.monotonic()))
        late = [rank.returncode is None for rank in ranks]
        for rank, is_late in zip(ranks, late, strict=True):
            if is_late:
                rank.send_signal(signal.SIGKILL)
            output, _ = rank.communicate()
            more = f"\n(still running after {timeout_s} s)" if is_late else ""
            results.append((int(rank.returncode or 0), output + more))
        return results
    finally:
        for rank in ranks:
            rank.end()


def run_ranks(
    script: pathlib.Path,
    n_ranks: int,
    *args: object,
    timeout_s: float = 120,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Run ``script`` once per rank; each rank's output, in order.

    Fails the test with the output of every rank when one exits non-zero or the time is up; only processes
    started here are ended.
    """
    results = finish(start(script, n_ranks, *args, environment=environment), timeout_s)
    text = "\n".join(f"--- rank {r}\n{output[-3000:]}" for r, (_, output) in enumerate(results))
    failed = [f"rank {r} exited with {code}" for r, (code, _) in enumerate(results) if code]
    assert not failed, f"{script.name} {' '.join(map(str, args))}: {'; '.join(failed)}\n{text}"
    return [output for _, output in results]
