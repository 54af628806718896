"""Two of torchrun's agents with a rank each: one is killed with its rank, and the other goes on alone.

Every loss of both starts is held against that of a run in one process that nothing disturbs.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from .soak import EXACT, undisturbed
from .work import Trainer

__all__ = ["measure"]

N_STEPS, KILLED_AT, EVERY = 40, 8, 2
STARTED_S, ENDED_S = 120.0, 180.0
ROOT = pathlib.Path(__file__).parents[2]


def _train(folder: pathlib.Path) -> None:
    """One rank's part of one start, by the pattern of the README."""
    world = int(os.environ["WORLD_SIZE"])
    trainer = Trainer(world, dtype=torch.float64, stall_limit_s=10.0)
    runtime, kept = trainer.runtime, trainer.kept
    done = runtime.resume(folder / "run", **kept)
    for n in range(done + 1, N_STEPS + 1):
        loss = trainer.train(1)[0]
        if runtime.rank == 0:
            with (folder / "losses").open("a") as out:
                out.write(json.dumps([world, n, loss]) + "\n")
        if n % EVERY == 0:
            runtime.save(folder / "run", keep_last=2, **kept)
        time.sleep(0.1)  # so that there is something to kill


def _agent(folder: pathlib.Path, port: int, is_host: bool) -> subprocess.Popen[bytes]:
    options = {
        "nnodes": "1:2",
        "nproc-per-node": "1",
        "max-restarts": "3",
        "rdzv-backend": "c10d",
        "rdzv-endpoint": f"127.0.0.1:{port}",
        "rdzv-id": "kept",
        "rdzv-conf": f"last_call_timeout=5,join_timeout=120,is_host={int(is_host)}",
        "local-addr": "127.0.0.1",
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", *(f"--{k}={v}" for k, v in options.items())]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (folder / f"log-{int(is_host)}").open("w") as log:
        return subprocess.Popen(
            [*launcher, "-m", __name__, str(folder)],
            env={**os.environ, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _kill(agent: subprocess.Popen[bytes]) -> None:
    """Kill an agent and its ranks at once, as a host that is gone."""
    pids = [agent.pid]
    for entry in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may end meanwhile
            if int(entry.read_text().rpartition(")")[2].split()[1]) == agent.pid:
                pids.append(int(entry.parent.name))
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.wait()


def measure() -> dict[str, Any]:
    """Steps by number of ranks, and by how much a loss differs: ``AssertionError`` where that shows."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="autopipe-agents-") as name:
        folder = pathlib.Path(name)
        agents = [_agent(folder, port, is_host) for is_host in (True, False)]
        try:
            until_s = time.monotonic() + STARTED_S
            while not (folder / "run" / f"step-{KILLED_AT:08d}").exists() and time.monotonic() < until_s:
                time.sleep(0.1)
            _kill(agents[1])
            code = agents[0].wait(ENDED_S)
        finally:
            for agent in agents:
                _kill(agent)
        log = (folder / "log-1").read_text()
        assert code == 0, log[-3000:]
        rows = [json.loads(line) for line in (folder / "losses").read_text().splitlines()]
    known = [loss for loss, _ in zip(undisturbed(), range(N_STEPS), strict=False)]
    steps = {world: [n for w, n, _ in rows if w == world] for world in sorted({w for w, _, _ in rows})}
    worst = max(abs(loss - known[n - 1]) for _, n, loss in rows)
    assert worst < EXACT, f"a loss differs by {worst}"
    return {
        "steps by ranks": {str(world): f"{min(ns)} to {max(ns)}" for world, ns in steps.items()},
        "worst": worst,
    }


if __name__ == "__main__":
    _train(pathlib.Path(sys.argv[1]))
