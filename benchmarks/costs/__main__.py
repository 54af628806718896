"""Runs the cost checks and keeps their figures: ``python -m benchmarks.costs --json OUT``.

What is checked is left to ``whole`` and ``pipelines``.
"""

from __future__ import annotations

import argparse
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

from .models import MODELS
from .pipelines import pipeline
from .whole import deep, estimates, sums, symbolic

PARTS = ("sums", "pipelines", "symbolic", "deep", "estimates")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path, required=True, help="kept and added to if it exists")
    parser.add_argument("--only", choices=PARTS, nargs="*", default=PARTS)
    parser.add_argument("--models", choices=list(MODELS), nargs="*", default=list(MODELS))
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    out: dict[str, Any] = json.loads(asked.json.read_text()) if asked.json.exists() else {}
    out["environment"] = {
        "device": device_name("cpu"),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for part in asked.only:
        for name, run in _runs(part, asked.models):
            start = time.perf_counter()
            out.setdefault(part, {})[name] = run(name)
            out["summary"] = _summary(out)
            asked.json.write_text(json.dumps(out, indent=1))
            print(f"{part} {name}: {time.perf_counter() - start:.0f} s", flush=True)
    print(json.dumps(out["summary"], indent=1))


def _runs(part: str, models: list[str]) -> list[tuple[str, Any]]:
    if part in ("sums", "pipelines"):
        run = {"sums": sums, "pipelines": pipeline}[part]
        return [(name, run) for name in models]
    if part == "estimates":
        return [("six models", lambda name: estimates())]
    return [("gpt2", {"symbolic": symbolic, "deep": deep}[part])]


def _summary(out: dict[str, Any]) -> dict[str, Any]:
    """Mean and largest error of each check, in percent."""
    pipelines = list(out.get("pipelines", {}).values())
    errors = {
        "sum against whole": [r["error"] for r in out.get("sums", {}).values()],
        "stage": [s["error"] for p in pipelines for s in p["stages"]],
        "step": [p["step"]["error"] for p in pipelines],
        "memory": [m["error"] for p in pipelines for m in p["memory"]],
        "estimate, efficiency fitted to the other models": [
            row["fitted_error"] for rows in out.get("estimates", {}).values() for row in rows.values()
        ],
        "formulas": [r["error"] for s in out.get("symbolic", {}).values() for r in s["rows"]],
    }
    summary: dict[str, Any] = {
        what: {
            "mean": round(100 * statistics.fmean(map(abs, found)), 2),
            "max": round(100 * max(map(abs, found)), 2),
            "lowest": round(100 * min(found), 2),
        }
        for what, found in errors.items()
        if found
    }
    if "deep" in out:
        summary["96 blocks over 4"] = round(out["deep"]["gpt2"]["ratio"], 2)
    return summary


if __name__ == "__main__":
    main()
