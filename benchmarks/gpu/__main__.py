"""Runs all that needs a GPU on the one there is, and writes what it found.

``python -m benchmarks.gpu`` runs the tests marked ``gpu``, then measures, prints the tables and writes
``results.json``. ``--device sim --size tiny`` runs the same measurements small on the simulated accelerator,
and ``--device cpu`` on the CPU, and writes to the file ``--out`` names.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
N_RANKS = (2, 4)
LIMITS_S = {"tests": 420.0, "alone": 420.0, "2 ranks": 240.0, "4 ranks": 300.0}
"""Of each part: 23 minutes together, though every one of them hangs."""


def tests() -> dict[str, Any]:
    """How the tests marked for a GPU ended."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu"]
    limit_s = LIMITS_S["tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
    print(done.stdout[-4000:], flush=True)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-300:]
    return {"passed": done.returncode == 0, "said": last, "seconds": time.perf_counter() - began}


def run(module: str, n_ranks: int, device: str, size: str, limit_s: float) -> Any:
    """What a module of this folder printed: on its own, or on ranks that share the card."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(n_ranks),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.gpu.{module}", device, size]
    began = time.perf_counter()
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, "RANK": str(r), "LOCAL_RANK": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(n_ranks)
    ]
    try:
        ends_s = began + limit_s
        outs = [rank.communicate(timeout=max(0.1, ends_s - time.perf_counter())) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for r, (rank, (out, error)) in enumerate(zip(ranks, outs, strict=True)):
        if rank.returncode:
            raise RuntimeError(f"{module} failed on rank {r}:\n{out[-500:]}\n{error[-3000:]}")
    return {**json.loads(outs[0][0].splitlines()[-1]), "seconds": time.perf_counter() - began}


def tables(found: dict[str, Any]) -> str:
    """What was found, as the README shows it."""
    alone, lines = found["alone"], []
    lines += ["| stage | predicted | measured | predicted / measured |", "|---|--:|--:|--:|"]
    rows = [(str(s["stage"]), s["predicted_s"], s["measured_s"]) for s in alone["profiled"]["stages"]]
    rows += [("step", alone["profiled"]["predicted_step_s"], alone["profiled"]["measured_step_s"])]
    lines += [f"| {n} | {p * 1e3:.3f} ms | {m * 1e3:.3f} ms | {p / m:.3f} |" for n, p, m in rows]
    lines += ["", "| one process, two stages | step | host's time | host waits |", "|---|--:|--:|--:|"]
    lines += [
        f"| {name} | {c['step_s'] * 1e3:.2f} ms | {c['host_s'] * 1e3:.2f} ms | {c['waits']:.1f} |"
        for name, c in alone["compared"].items()
    ]
    lines += ["", "| ranks on one card | schedule | loss | gradients |", "|--:|---|--:|--:|"]
    for n in N_RANKS:
        parity = found[f"{n} ranks"]["parity"]
        lines += [f"| {n} | {s} | {e['loss']:.1e} | {e['gradients']:.1e} |" for s, e in parity.items()]
    lines += ["", "| ranks | rank | memory predicted | held at most | ratio |", "|--:|--:|--:|--:|--:|"]
    for n in N_RANKS:
        memory = found[f"{n} ranks"]["memory"]
        pairs = enumerate(zip(memory["predicted_bytes"], memory["held_bytes"], strict=False))
        lines += [f"| {n} | {r} | {p / 1e6:.1f} MB | {h / 1e6:.1f} MB | {p / h:.2f} |" for r, (p, h) in pairs]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "sim", "cpu"))
    parser.add_argument("--size", default="full", choices=("full", "tiny"))
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results.json")
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    given = parser.parse_args()
    parts: dict[str, Callable[[], Any]] = {"tests": tests} if not given.no_tests else {}
    ranks = {"alone": ("alone", 1), **{f"{n} ranks": ("ranks", n) for n in N_RANKS}}
    for part, (module, n) in ranks.items():
        parts[part] = functools.partial(run, module, n, given.device, given.size, LIMITS_S[part])
    found: dict[str, Any] = {}
    for part, measure in parts.items():
        try:
            found[part] = measure()
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            found[part] = {"failed": str(error)}
            print(f"{part}: {error}", flush=True)
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    failed = [part for part, what in found.items() if "failed" in what or not what.get("passed", True)]
    if not any("failed" in what for what in found.values()):
        print(f"{found['alone']['device']}, torch {found['alone']['torch']}\n\n{tables(found)}")
    print(f"{len(found) - len(failed)} of {len(found)} parts went well; {given.out} has them")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
