"""Measures the runtime against torch's own schedules, a hand-written loop and the plain model.

``python -m benchmarks.runtime [NAME ...] [--out FILE]`` runs the named measurements, or all, and adds their
results to FILE (``benchmarks/runtime/results.json``).
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import platform
import statistics
from collections.abc import Callable, Sequence

import torch

from .ranks import launch

HERE = pathlib.Path(__file__).parent
TRANSFORMER = {"model": "transformer", "options": {}, "width": 256, "length": 128, "rows": 32}


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """Median of paired ratios, and the 95 % interval of the median by order statistics."""
    found = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
    n = len(found)
    low = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    return {"median": statistics.median(found), "low": found[low], "high": found[n - 1 - low], "pairs": n}


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


def step_1f1b() -> dict:
    """The transformer on two ranks: against torch's 1F1B, and the ceiling times its bubble."""
    cuts = {name: [4] for name in ("ours", "torch")}
    found = launch(
        "compare", 2, 300, **TRANSFORMER, cuts=cuts, schedule="1f1b", n_microbatches=8,
        runners=["ours", "torch"], repeats=12, steps=1,
    )  # fmt: skip
    ours, torchs = found["wall_s"]["ours"], found["wall_s"]["torch"]
    return {"step_s": medians(found["wall_s"]), "ours over torch": ratios(ours, torchs)}


def step_ceiling() -> dict:
    """Our 1F1B step against what two ranks compute without communication, times the bubble."""
    n_microbatches = 8
    found = launch("against_ceiling", 2, 300, n_microbatches=n_microbatches, repeats=12, steps=1)
    bound = 1 + 1 / n_microbatches
    ceiling = [bound * s for s in found["wall_s"]["ceiling"]]
    return {"step_s": medians(found["wall_s"]), "ours over bound": ratios(found["wall_s"]["ours"], ceiling)}


def step_interleaved() -> dict:
    """The transformer with two stages per rank against torch's interleaved 1F1B."""
    cuts = {name: [2, 4, 6] for name in ("ours", "torch")}
    found = launch(
        "compare", 2, 300, **TRANSFORMER, cuts=cuts, schedule="interleaved", n_microbatches=8,
        runners=["ours", "torch"], repeats=10, steps=1,
    )  # fmt: skip
    wall = found["wall_s"]
    return {"step_s": medians(wall), "ours over torch": ratios(wall["ours"], wall["torch"])}


def cpu_per_microbatch() -> dict:
    """CPU of one microbatch through two stages of one neuron each."""
    n = 32
    found = launch(
        "compare", 2, 200, model="neurons", options={"n": 2}, width=1, length=0, rows=n,
        cuts={name: [1] for name in ("ours", "torch", "by hand")}, schedule="1f1b", n_microbatches=n,
        runners=["ours", "torch", "by hand"], repeats=25, steps=6,
    )  # fmt: skip
    cpu = found["cpu_s"]
    return {
        "cpu_ms_per_microbatch": {name: 1e3 * s / n for name, s in medians(cpu).items()},
        "ours over torch": ratios(cpu["ours"], cpu["torch"]),
        "by hand over torch": ratios(cpu["by hand"], cpu["torch"]),
    }


def cpu_per_action() -> dict:
    """CPU of one action on interleaved 1F1B, four one-neuron stages on each of two ranks."""
    n_stages, n = 8, 16
    found = launch(
        "compare", 2, 200, model="neurons", options={"n": n_stages}, width=1, length=0, rows=n,
        cuts={name: list(range(1, n_stages)) for name in ("ours", "torch")}, schedule="interleaved",
        n_microbatches=n, runners=["ours", "torch"], repeats=21, steps=4,
    )  # fmt: skip
    cpu, n_actions = found["cpu_s"], 2 * n_stages * n
    return {
        "cpu_us_per_action": {name: 1e6 * s / n_actions for name, s in medians(cpu).items()},
        "ours over torch": ratios(cpu["ours"], cpu["torch"]),
    }


def in_process() -> dict:
    """All stages in one process against the plain model accumulating over the same microbatches."""
    found = launch(
        "in_process", 1, 200, rows=16, length=128, width=256, n_microbatches=4, repeats=12, steps=1
    )
    wall = found["wall_s"]
    return {"step_s": medians(wall), "ours over plain": ratios(wall["ours"], wall["plain"])}


def heavy_head() -> dict:
    """A heavy head: our runtime on the cut by measured times against torch's 1F1B on equal layer counts."""
    model = {"model": "heavy_head", "options": {}, "width": 256, "length": 64}
    seconds = launch("layer_seconds", 2, 100, **model, rows=2)["seconds"]
    n = len(seconds)
    best = min(range(1, n), key=lambda cut: max(sum(seconds[:cut]), sum(seconds[cut:])))
    uniform = n - n // 2
    found = launch(
        "compare", 2, 300, **model, rows=16, cuts={"ours": [best], "torch": [uniform]}, schedule="1f1b",
        n_microbatches=8, runners=["ours", "torch"], repeats=12, steps=1, out_width=16384,
    )  # fmt: skip
    wall = found["wall_s"]
    return {
        "layer_ms": [round(1e3 * s, 2) for s in seconds],
        "cut": {"ours": best, "torch": uniform},
        "step_s": medians(wall),
        "torch over ours": ratios(wall["torch"], wall["ours"]),
    }


def exactness() -> dict:
    """The adversarial programs on every schedule: largest difference from one process, fp64."""
    found: dict[str, dict] = {}
    for program, noisy in (("exact", False), ("noisy", True)):
        in_process = launch("exactness", 1, 300, planned=4, noisy=noisy)
        found[program] = {"in process": in_process}
        for n in (1, 2, 3, 4):
            found[program][f"{n} ranks"] = launch("exactness", n, 300, planned=n, noisy=noisy)
    worst = max(error for runs in found.values() for run in runs.values() for error in run.values())
    return {"worst": worst, **found}


def memory() -> dict:
    """Resident bytes and live tensors after 1,000, 5,000 and 10,000 steps."""
    options = {"schedule": "1f1b", "marks": [1_000, 5_000, 10_000]}
    runs = {"in process": launch("endurance", 1, 600, **options)}
    runs["2 ranks"] = launch("endurance", 2, 900, **options)
    growth = [
        marks[-1]["resident_bytes"] - marks[0]["resident_bytes"] for run in runs.values() for marks in run
    ]
    return {"most growth from 1,000 to 10,000 steps, bytes": max(growth), **runs}


MEASUREMENTS: dict[str, Callable[[], dict]] = {
    f.__name__: f
    for f in (
        step_1f1b,
        step_ceiling,
        step_interleaved,
        cpu_per_microbatch,
        cpu_per_action,
        in_process,
        heavy_head,
        exactness,
        memory,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MEASUREMENTS))
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results.json")
    options = parser.parse_args()
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    results["environment"] = {"torch": torch.__version__, "cpus": torch.get_num_threads()}
    results["environment"]["python"] = platform.python_version()
    for name in options.names or MEASUREMENTS:
        results[name] = MEASUREMENTS[name]()
        print(name, json.dumps(results[name]), flush=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
