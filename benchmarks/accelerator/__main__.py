"""Compares what hosts wait for and what is sent in a step, ours and torch's, on the simulated accelerator.

``python -m benchmarks.accelerator`` prints the table and writes ``results.json``. It builds the accelerator
(g++, ninja) where the tests have not.
"""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
CASES = (("1f1b", 2, [4]), ("1f1b", 4, [2, 4, 6]), ("interleaved", 2, [2, 4, 6]))
LIMIT_S = 120.0


def launch(who: str, schedule: str, n_ranks: int, cuts: list[int]) -> list[Any]:
    """What each rank of one contender found."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(n_ranks),
        "SIM_DEVICES": str(n_ranks),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.accelerator.rank",
        who,
        schedule,
        *map(str, cuts),
    ]
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, "RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for r in range(n_ranks)
    ]
    try:
        outs = [rank.communicate(timeout=LIMIT_S)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads(out.splitlines()[-1]) for out in outs]


def main() -> None:
    results = []
    print("| schedule | ranks | | host waits per step, by rank | races | MB sent per step, by rank |")
    print("|---|--:|---|---|--:|---|")
    for schedule, n_ranks, cuts in CASES:
        for who in ("ours", "torch"):
            found = launch(who, schedule, n_ranks, cuts)
            results.append({"schedule": schedule, "n_ranks": n_ranks, "who": who, "ranks": found})
            waits = ", ".join(f"{r['host_waits']:.0f}" for r in found)
            sent = ", ".join(f"{r['bytes_sent'] / 1e6:.3f}" for r in found)
            print(f"| {schedule} | {n_ranks} | {who} | {waits} | {sum(r['races'] for r in found)} | {sent} |")
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
