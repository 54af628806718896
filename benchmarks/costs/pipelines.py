"""Starts two-process pipelines and sums up how far their predictions were from what they did.

What each process does is left to ``rank``.
"""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from typing import Any

__all__ = ["pipeline"]

_LIMIT_S = 600


def pipeline(
    name: str,
    n_ranks: int = 2,
    n_microbatches: int = 4,
    *,
    rounds: int = 5,
    steps: int = 5,
    profiles: bool = True,
) -> dict[str, Any]:
    """Figures of one model's pipeline over gloo on this machine, one thread per process."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as s:
        out = pathlib.Path(folder) / "figures.json"
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
        s.close()
        common = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": str(n_ranks),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, "-m", "benchmarks.costs.rank", name, str(out)]
        command += map(str, (n_microbatches, rounds, steps, int(profiles)))
        ranks = [
            subprocess.Popen(command, env={**common, "RANK": str(r), "LOCAL_RANK": str(r)})
            for r in range(n_ranks)
        ]
        try:
            codes = [p.wait(timeout=_LIMIT_S) for p in ranks]
        finally:
            for p in ranks:
                p.kill()
                p.wait()
        if any(codes):
            raise RuntimeError(f"the pipeline of {name} ended with {codes}")
        return _with_errors(json.loads(out.read_text()))


def _with_errors(figures: dict[str, Any]) -> dict[str, Any]:
    for stage in figures["stages"]:
        _errors(stage, {at: sum(stage[kind][at] for kind in "FB") for at in stage["F"]})
    _errors(figures["step"], figures["step"])
    step, uniform = figures["step"], figures["uniform"]
    gains = [uniform[at] / step[at] for at in ("predicted_s", "measured_s")]
    uniform["error"] = gains[0] / gains[1] - 1
    for cause in figures["causes"].values():
        cause["share"] = (cause["predicted_s"] - cause["measured_s"]) / step["measured_s"]
    for row in figures["memory"]:
        row["error"] = row["predicted_bytes"] / row["measured_bytes"] - 1
    return figures


def _errors(row: dict[str, Any], seconds: dict[str, float]) -> None:
    """Of the first profile, taken before anything ran, and of the median of all, taken in between."""
    row["first_error"] = seconds["predicted_s"] / seconds["measured_s"] - 1
    row["error"] = seconds["interleaved_s"] / seconds["measured_s"] - 1
