"""Runs ``python -m benchmarks.home``: tasks of users, plain and split, lines beyond the plain file, parity.

The tasks are whole files under ``tasks``: ``NAME_plain.py`` runs in one process, the others on two ranks.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from typing import Any

import torch

LIMIT_S = 180
HERE = pathlib.Path(__file__).parent
TASKS = ("loop", "trainer", "generate", "encoder", "adapters", "accelerate", "lightning")
WAYS = ("autopipe", "torch", "accelerate")
PACKAGES = ("torch", "transformers", "accelerate", "peft", "lightning")
NAMES = {
    "loop": "a training loop: schedule, clipping",
    "trainer": "transformers' Trainer: accumulation, cosine, evaluation, best checkpoint, saved model",
    "generate": "generating from prompts of unequal length",
    "encoder": "generating with an encoder (T5), by beams",
    "adapters": "LoRA, adapters alone saved",
    "accelerate": "Accelerate's loop: accumulation, clipping, saved state",
    "lightning": "Lightning's Trainer: clipping, logging",
}
WAY_NAMES = {
    "autopipe": "autopipe",
    "torch": "`torch.distributed.pipelining`",
    "accelerate": "Accelerate's own pipeline",
}
WITHOUT = {
    "torch": "not in it: stages and schedules of one loop",
    "accelerate": "not in it: `prepare_pippy` runs forwards, without training or `generate`",
}
"""Why a way has no file for a task."""


def code(path: pathlib.Path) -> list[str]:
    """Lines that say something."""
    return [line.strip() for line in path.read_text().splitlines() if line.strip() and line.strip()[0] != "#"]


def lines_beyond(path: pathlib.Path, plain: pathlib.Path) -> int:
    """Lines that were added or written otherwise."""
    return sum(line.startswith("+ ") for line in difflib.ndiff(code(plain), code(path)))


def run(script: pathlib.Path, out: pathlib.Path, n_ranks: int) -> tuple[Any, str]:
    """What a script reports, and its last word where it failed."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(n_ranks)}
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": str(n_ranks)}
    paths = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    processes = []
    for rank in range(n_ranks):
        ranked = {**place, **own, "RANK": str(rank), "LOCAL_RANK": str(rank)} if n_ranks > 1 else own
        env = {**os.environ, **ranked, "PYTHONPATH": paths}
        command = [sys.executable, "-W", "ignore", str(script), str(out)]
        processes.append(subprocess.Popen(command, env=env, stdout=-1, stderr=-2, text=True))
    try:
        said = [p.communicate(timeout=LIMIT_S)[0] for p in processes]
    except subprocess.TimeoutExpired:
        return None, f"not done in {LIMIT_S} s"
    finally:
        for p in processes:
            p.kill()
            p.wait()
    if any(p.returncode for p in processes):
        words = [line for text in said for line in text.splitlines() if "Error" in line]
        own = [line for line in words if "Connection closed" not in line]
        return None, (own or words or ["failed without a word"])[0][:160]
    return torch.load(out), ""


def apart(found: Any, expected: Any) -> float | str:
    """The largest difference of weights; of tokens, whether they are equal."""
    if isinstance(expected, torch.Tensor):
        return "equal" if torch.equal(found, expected) else "other tokens"
    missing = set(expected) - set(found)
    if missing:
        return f"{len(missing)} weights missing"
    return max(float((found[k] - v).abs().max()) for k, v in expected.items())


def measure(task: str, folder: pathlib.Path) -> list[dict[str, Any]]:
    plain = HERE / "tasks" / f"{task}_plain.py"
    expected, fault = run(plain, folder / f"{task}_plain.pt", 1)
    if fault:
        return [{"task": task, "way": "plain", "lines": len(code(plain)), "result": fault}]
    rows = []
    for way in WAYS:
        script = HERE / "tasks" / f"{task}_{way}.py"
        if not script.exists():
            rows.append({"task": task, "way": way, "lines": None, "result": WITHOUT[way]})
            continue
        found, fault = run(script, folder / f"{task}_{way}.pt", 2)
        result = fault or apart(found, expected)
        rows.append({"task": task, "way": way, "lines": lines_beyond(script, plain), "result": result})
        rows[-1]["plain lines"] = len(code(plain))
        print(rows[-1], flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The results as the README shows them."""
    lines = [
        "| task | lines of the plain file | way | lines beyond | apart from plain |",
        "|---|--:|---|--:|---|",
    ]
    for row in rows:
        result = row["result"]
        shown = f"{result:.1e}" if isinstance(result, float) else result
        task = NAMES[row["task"]] if row["way"] in ("autopipe", "plain") else ""
        plain = row.get("plain lines", "") if task else ""
        way = WAY_NAMES.get(row["way"], row["way"])
        lines.append(f"| {task} | {plain} | {way} | {row['lines'] or '–'} | {shown} |")
    return "\n".join(lines)


def write(rows: list[dict[str, Any]]) -> None:
    """The results as JSON, and as the table between the README's Result and Environment."""
    versions = {name: version(name) for name in PACKAGES}
    (HERE / "results.json").write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    readme = HERE / "README.md"
    before, _, rest = readme.read_text().partition("## Result\n")
    told = ", ".join(f"{name} {number}" for name, number in versions.items())
    after = rest[rest.index("## To Reproduce") :]
    environment = f"## Environment\n\nTwo ranks on two shared cores, one thread each; {told}.\n\n"
    readme.write_text(f"{before}## Result\n\n{table(rows)}\n\n{environment}{after}")


def speed(folder: pathlib.Path) -> dict[str, Any]:
    """Tokens per second by number of prompts: one process with one thread, two ranks with one each."""
    found = {}
    for way, n_ranks in (("plain", 1), ("autopipe", 2)):
        found[way], fault = run(HERE / "tasks" / f"speed_{way}.py", folder / f"{way}.pt", n_ranks)
        if fault:
            return {"fault": fault}
    told = {}
    for n, plain in found["plain"].items():
        ours = found["autopipe"][n]
        rates = {k: round(v, 1) for x in (plain, ours) for k, v in x.items() if k != "tokens"}
        told[n] = rates | {"tokens": apart(ours["tokens"], plain["tokens"])}
    return told


ABSENT = "absent"


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.home")
    parser.add_argument("tasks", nargs="*", default=TASKS)
    parser.add_argument("--speed", action="store_true", help="only tokens per second")
    chosen = parser.parse_args()
    if chosen.speed:
        with tempfile.TemporaryDirectory() as folder:
            print(speed(pathlib.Path(folder)))
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for task in chosen.tasks for row in measure(task, pathlib.Path(folder))]
    print(table(rows))
    if set(chosen.tasks) == set(TASKS):
        write(rows)


if __name__ == "__main__":
    main()
