"""Starts the ranks of a measurement on 127.0.0.1 and collects what rank 0 found.

What is measured is left to ``measurements``.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from typing import Any

MEASUREMENTS = "benchmarks.runtime.measurements"


def launch(
    name: str, n_ranks: int, timeout_s: float, *, module: str = MEASUREMENTS, **options: object
) -> Any:
    """Run a module's function on ``n_ranks`` single-threaded processes; what rank 0 returned."""
    with socket.socket() as s, tempfile.NamedTemporaryFile("r", suffix=".json") as out:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        s.close()
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(n_ranks),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [
            sys.executable,
            "-m",
            MEASUREMENTS,
            f"{module}:{name}",
            json.dumps(options),
            out.name,
        ]
        processes = [
            subprocess.Popen(command, env={**environment, "RANK": str(r), "LOCAL_RANK": str(r)})
            for r in range(n_ranks)
        ]
        try:
            codes = [p.wait(timeout=timeout_s) for p in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise RuntimeError(f"{name} failed: exit codes {codes}")
        return json.load(out)
