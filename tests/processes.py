"""Starts a script on several ranks over loopback and ends them all, whatever happens."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

__all__ = ["run_ranks"]

ROOT = pathlib.Path(__file__).parents[1]


def run_ranks(script: pathlib.Path, n_ranks: int, *args: str, timeout_s: float = 120) -> list[str]:
    """Run ``script`` once per rank with torchrun's environment; each rank's output, in order.

    Fails the test with the output of every rank when one exits non-zero or the time is up; only processes
    started here are ended.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(n_ranks),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *args],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(n_ranks)
    ]
    deadline = time.monotonic() + timeout_s
    outputs, failures = [], []
    try:
        for rank, process in enumerate(ranks):
            try:
                output, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
                failures.append(f"rank {rank} was still running after {timeout_s} s")
            outputs.append(output)
            if process.returncode:
                failures.append(f"rank {rank} exited with {process.returncode}")
    finally:
        for process in ranks:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    text = "\n".join(f"--- rank {r}\n{o[-3000:]}" for r, o in enumerate(outputs))
    assert not failures, f"{'; '.join(failures)}\n{text}"
    return outputs
