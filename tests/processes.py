"""Starts a script on several ranks over loopback and ends them all, whatever happens."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

__all__ = ["finish", "free_port", "run_ranks", "start"]

ROOT = pathlib.Path(__file__).parents[1]
PATHS = (ROOT, ROOT / "tests", ROOT / "tests" / "runtime", ROOT / "tests" / "accelerator")


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens at."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start(
    script: pathlib.Path, n_ranks: int, *args: object, environment: Mapping[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """The processes of all ranks, with torchrun's environment and what ``environment`` adds."""
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(n_ranks),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
        **(environment or {}),
    }
    return [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(script), *map(str, args)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(n_ranks)
    ]


def finish(processes: Sequence[subprocess.Popen[str]], timeout_s: float) -> list[tuple[int, str]]:
    """(exit code, output) of each; those that are not done in time are ended, and say so.

    All are read at once: a rank whose pipe is full stands still, and with it those that wait for it.
    """
    deadline = time.monotonic() + timeout_s

    def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
        try:
            output, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            output += f"\n(still running after {timeout_s} s)"
        return process.returncode, output

    try:
        with concurrent.futures.ThreadPoolExecutor(len(processes)) as readers:
            return list(readers.map(ended, processes))
    finally:
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


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
