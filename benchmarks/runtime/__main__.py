"""Measures the runtime against torch's own schedules, a hand-written loop and the plain model.

``python -m benchmarks.runtime [NAME ...] [--json FILE]`` runs the named measurements, and puts their results
in FILE (``benchmarks/runtime/results.json``). Without names all run, and nothing else stays in it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from .ranks import launch

HERE = pathlib.Path(__file__).parent
TRANSFORMER = {"model": "transformer", "options": {}, "row": [128, 256], "rows": 32}
N_MICROBATCHES = 8


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """Median of paired ratios, and the 95 % interval of the median by order statistics."""
    found = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
    n = len(found)
    low = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    return {"median": statistics.median(found), "low": found[low], "high": found[n - 1 - low], "pairs": n}


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


def step_1f1b() -> dict:
    """The transformer on two ranks against torch's 1F1B, and against its bound.

    The bound is the time two ranks need with nothing to send, both at work, times the schedule's bubble.
    """
    found = launch(
        "compare", 2, 300, **TRANSFORMER, runners={"ours": [4], "torch": [4], "ceiling": [4]},
        schedule="1f1b", n_microbatches=N_MICROBATCHES, rounds=36, steps=1,
    )  # fmt: skip
    wall = found["wall_s"]
    bound_s = [(1 + 1 / N_MICROBATCHES) * s for s in wall["ceiling"]]
    return {
        "step_s": medians(wall),
        "ours over torch": ratios(wall["ours"], wall["torch"]),
        "ours over bound": ratios(wall["ours"], bound_s),
        "torch over bound": ratios(wall["torch"], bound_s),
    }


def step_interleaved() -> dict:
    """The transformer with two stages per rank against torch's interleaved 1F1B."""
    found = launch(
        "compare", 2, 300, **TRANSFORMER, runners={"ours": [2, 4, 6], "torch": [2, 4, 6]},
        schedule="interleaved", n_microbatches=N_MICROBATCHES, rounds=36, steps=1,
    )  # fmt: skip
    wall = found["wall_s"]
    return {"step_s": medians(wall), "ours over torch": ratios(wall["ours"], wall["torch"])}


def cpu_per_microbatch() -> dict:
    """CPU of both ranks for one microbatch through two stages of one neuron each."""
    n = 32
    found = launch(
        "compare", 2, 200, model="neurons", options={"n": 2}, row=[1], rows=n,
        runners={"ours": [1], "torch": [1], "by hand": [1], "by hand over a socket": [1]},
        schedule="1f1b", n_microbatches=n, rounds=40, steps=6,
    )  # fmt: skip
    cpu = found["cpu_s"]
    return {
        "cpu_us_per_microbatch": {name: 1e6 * s / n for name, s in medians(cpu).items()},
        "ours over torch": ratios(cpu["ours"], cpu["torch"]),
        "by hand over torch": ratios(cpu["by hand"], cpu["torch"]),
        "by hand over a socket over torch": ratios(cpu["by hand over a socket"], cpu["torch"]),
    }


def cpu_per_action() -> dict:
    """CPU of both ranks for one action of interleaved 1F1B, four one-neuron stages on each."""
    n_stages, n = 8, 16
    cuts = list(range(1, n_stages))
    found = launch(
        "compare", 2, 200, model="neurons", options={"n": n_stages}, row=[1], rows=n,
        runners={"ours": cuts, "torch": cuts}, schedule="interleaved", n_microbatches=n, rounds=40, steps=4,
    )  # fmt: skip
    cpu, n_actions = found["cpu_s"], 2 * n_stages * n
    return {
        "cpu_us_per_action": {name: 1e6 * s / n_actions for name, s in medians(cpu).items()},
        "ours over torch": ratios(cpu["ours"], cpu["torch"]),
    }


def in_process() -> dict:
    """All stages in one process against the plain model accumulating over the same microbatches."""
    found = launch(
        "compare", 1, 200, **{**TRANSFORMER, "rows": 8}, runners={"ours": [4], "plain": []},
        schedule="1f1b", n_microbatches=4, rounds=40, steps=1,
    )  # fmt: skip
    wall = found["wall_s"]
    return {"step_s": medians(wall), "ours over plain": ratios(wall["ours"], wall["plain"])}


def heavy_head() -> dict:
    """Five transformer blocks and a head of 16,384 classes per token."""
    return _measured_against_uniform(model="heavy_head", row=[64, 256], n_layers=6)


def heavy_head_32() -> dict:
    """The same in 32 microbatches of the same size, where filling and draining weigh less."""
    return _measured_against_uniform(
        model="heavy_head", row=[64, 256], n_layers=6, n_microbatches=32, rounds=16
    )


def language_model() -> dict:
    """Token embedding, six blocks and a head: DistilGPT2's proportions, a third of its width."""
    return _measured_against_uniform(model="language_model", row=[64], n_layers=8)


def pyramid() -> dict:
    """A hierarchical vision network, ConvNeXt-T at a third of its width, on 128 × 128 images."""
    return _measured_against_uniform(model="pyramid", row=[3, 128, 128], n_layers=23)


def _measured_against_uniform(
    *, model: str, row: list[int], n_layers: int, n_microbatches: int = N_MICROBATCHES, rounds: int = 36
) -> dict:
    """The cut by measured costs against equal layer counts under torch's 1F1B; the former under both."""
    rows = 2 * n_microbatches
    common = {"model": model, "options": {}, "row": row, "rows": rows, "n_microbatches": n_microbatches}
    measured = launch("measured_cut", 2, 200, **common)
    cut, uniform = measured["cut"], n_layers - n_layers // 2
    found = launch(
        "compare", 2, 300, **common, runners={"ours": [cut], "torch": [cut], "torch@uniform": [uniform]},
        schedule="1f1b", rounds=rounds, steps=1,
    )  # fmt: skip
    wall = found["wall_s"]
    return {
        "n_microbatches": n_microbatches,
        "layers": n_layers,
        "layers of the first stage": {"measured": cut, "uniform": uniform},
        "predicted stage_ms": measured["stage_ms"],
        "step_s": medians(wall),
        "uniform over measured, both torch": ratios(wall["torch@uniform"], wall["torch"]),
        "uniform torch over measured ours": ratios(wall["torch@uniform"], wall["ours"]),
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
    """Resident bytes and live tensors after 1,000, 5,000, 10,000 and 20,000 steps."""
    options = {"schedule": "1f1b", "marks": [1_000, 5_000, 10_000, 20_000]}
    runs = {"in process": launch("endurance", 1, 600, **options)}
    runs["2 ranks"] = launch("endurance", 2, 900, **options)
    ranks = [marks for run in runs.values() for marks in run]
    most = {
        f"most growth from {early['step']:,} steps on, bytes": max(
            marks[-1]["resident_bytes"] - marks[i]["resident_bytes"] for marks in ranks
        )
        for i, early in enumerate(ranks[0][:-1])
    }
    return {**most, **runs}


MEASUREMENTS: dict[str, Callable[[], dict]] = {
    f.__name__: f
    for f in (
        step_1f1b,
        step_interleaved,
        cpu_per_microbatch,
        cpu_per_action,
        in_process,
        heavy_head,
        heavy_head_32,
        language_model,
        pyramid,
        exactness,
        memory,
    )
}


def busy_s() -> float:
    """Seconds all processors of this machine have been busy with anything, since it started (Linux)."""
    fields = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _wait, interrupts, softirqs = map(int, fields[:7])
    return (user + nice + system + interrupts + softirqs) / os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """CPU seconds of this process and of the ranks it started that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measure(name: str) -> dict:
    """A measurement's results, how long it took, and how many cores other work kept busy meanwhile."""
    start_s, other_s = time.perf_counter(), busy_s() - own_s()
    found = MEASUREMENTS[name]()
    took_s = time.perf_counter() - start_s
    return {**found, "took_s": took_s, "cores_others_used": (busy_s() - own_s() - other_s) / took_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MEASUREMENTS))
    parser.add_argument("--json", type=pathlib.Path, default=HERE / "results.json")
    options = parser.parse_args()
    results = json.loads(options.json.read_text()) if options.names and options.json.exists() else {}
    results["environment"] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "threads_per_rank": 1,
    }
    for name in options.names or MEASUREMENTS:
        results[name] = measure(name)
        print(name, json.dumps(results[name]), flush=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
