"""Runs the cost checks and keeps their figures: ``python -m benchmarks.costs --json OUT``.

What is checked is left to ``whole`` and ``pipelines``, what the figures say in words to ``table``.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import pathlib
import platform
import statistics
import time
import warnings
from typing import Any

import torch

from autopipe.measure import device_name

from .elsewhere import CROWDED, SHAPES
from .load import DISTURBED, OtherLoad
from .models import MODELS
from .pipelines import pipeline
from .table import table
from .whole import deep, estimates, sums, symbolic

ELSEWHERE = {"elsewhere": SHAPES, "crowded": CROWDED}
"""Parts that are run when named: they need the packages that ``elsewhere`` lists."""
_ALL = [*MODELS, *SHAPES]
PARTS = ("sums", "pipelines", "symbolic", "deep", "estimates")
_ROUNDS, _STEADY_ROUNDS, _STARTS = 5, 3, 3
"""Of a model from elsewhere: rounds wanted, how many are to hold the profile's pace, and starts at most."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--json", type=pathlib.Path, required=True, help="a run of a part adds to it if it exists"
    )
    parser.add_argument("--only", choices=(*PARTS, *ELSEWHERE), nargs="*", default=PARTS)
    parser.add_argument("--models", choices=_ALL, nargs="*", default=_ALL)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    adds = asked.json.exists() and (set(asked.only) != set(PARTS) or set(asked.models) != set(_ALL))
    out: dict[str, Any] = json.loads(asked.json.read_text()) if adds else {}
    out["environment"] = {
        "device": device_name("cpu"),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for part in asked.only:
        for name, run in _runs(part, asked.models):
            start = time.perf_counter()
            with OtherLoad() as others:
                figures = run(name)
            took = time.perf_counter() - start
            is_disturbed = others.share > DISTURBED or figures.get("steady_rounds", _ROUNDS) < _STEADY_ROUNDS
            mark = {"seconds": took, "other_load": others.share, "disturbed": is_disturbed}
            out.setdefault(part, {})[name] = {**figures, "run": mark}
            out["summary"] = _summary(out)
            asked.json.write_text(json.dumps(out, indent=1))
            print(f"{part} {name}: {took:.0f} s, others used {others.share:.1%} of the CPU", flush=True)
    print(table(out))


def _runs(part: str, models: list[str]) -> list[tuple[str, Any]]:
    if part in ("sums", "pipelines"):
        run = {"sums": sums, "pipelines": pipeline}[part]
        return [(name, run) for name in MODELS if name in models]
    if part in ELSEWHERE:
        shapes = ELSEWHERE[part]
        return [(name, functools.partial(_elsewhere, *shapes[name])) for name in shapes if name in models]
    if part == "estimates":
        return [("six models", lambda name: estimates())]
    return [("gpt2", {"symbolic": symbolic, "deep": deep}[part])]


def _elsewhere(n_ranks: int, n_microbatches: int, name: str) -> dict[str, Any]:
    """A pipeline of another package's model, held against one profile taken before anything ran.

    Where too few rounds held the profile's pace all is begun anew, the profile too, and what held it longest
    counts: the pace alone decides, whatever the errors are.
    """
    starts: list[dict[str, Any]] = []
    while len(starts) < _STARTS and all(s["steady_rounds"] < _STEADY_ROUNDS for s in starts):
        starts.append(pipeline(name, n_ranks, n_microbatches, rounds=_ROUNDS, steps=5, profiles=False))
    figures = max(starts, key=lambda s: s["steady_rounds"])
    others = [{"steady_rounds": s["steady_rounds"], "step": s["step"]["first_error"]} for s in starts]
    return {**figures, "starts": others, "n_ranks": n_ranks, "n_microbatches": n_microbatches}


def _summary(out: dict[str, Any]) -> dict[str, Any]:
    """Mean and largest error of each check over all its runs, disturbed ones too."""
    pipelines = list(out.get("pipelines", {}).values())
    others = list(out.get("elsewhere", {}).values())
    estimated = [row for found in out.get("estimates", {}).values() for row in found["rows"].values()]
    errors = {
        "sums": [r["error"] for r in out.get("sums", {}).values()],
        "stage": [s["error"] for p in pipelines for s in p["stages"]],
        "stage, first profile": [s["first_error"] for p in pipelines for s in p["stages"]],
        "step": [p["step"]["error"] for p in pipelines],
        "step, first profile": [p["step"]["first_error"] for p in pipelines],
        "memory": [m["error"] for p in pipelines for m in p["memory"]],
        "elsewhere, stage": [s["first_error"] for p in others for s in p["stages"]],
        "elsewhere, speed-up": [p["uniform"]["error"] for p in others if p["n_ranks"] > 1],
        "elsewhere, step": [p["step"]["first_error"] for p in others],
        "crowded, step": [p["step"]["first_error"] for p in out.get("crowded", {}).values()],
        "symbolic": [r["error"] for s in out.get("symbolic", {}).values() for r in s["rows"]],
        "estimates, fitted": [row["fitted_error"] for row in estimated],
        "estimates, assumed": [row["assumed_error"] for row in estimated],
    }
    summary: dict[str, Any] = {
        what: {
            "n": len(found),
            "mean": statistics.fmean(map(abs, found)),
            "largest": max(found, key=abs),
            "lowest": min(found),
        }
        for what, found in errors.items()
        if found
    }
    if "deep" in out:
        summary["deep"] = out["deep"]["gpt2"]["ratio"]
    return summary


if __name__ == "__main__":
    main()
