"""Checks in one process: sums against whole models, formulas at sizes never fitted, deep models.

Pipelines of two processes are left to ``pipelines``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import autopipe
from autopipe.measure import device, estimate, fit, fit_costs, profile
from autopipe.measure.estimate import accounts

from .models import MODELS, build

__all__ = ["deep", "estimates", "sums", "symbolic"]

FITTED = ((1, 64), (2, 128), (4, 192))
ROUNDS = 5
PREDICTED = ((1, 128), (2, 64), (2, 192), (3, 96), (4, 128))


def sums(name: str) -> dict[str, Any]:
    """The sum of the op costs against the untouched model's own forward and backward, after each profile.

    The round with the median error counts.
    """
    model, args, kwargs = build(name, batch=2)
    captured = autopipe.capture(model, args, kwargs)
    rounds = sorted((_round(captured, model, args, kwargs) for _ in range(ROUNDS)), key=lambda r: r["error"])
    return {**rounds[ROUNDS // 2], "errors": [r["error"] for r in rounds]}


def _round(captured: autopipe.Capture, model: torch.nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    start = time.perf_counter()
    table = profile(captured, progress=False)
    took = time.perf_counter() - start
    forward, backward = _whole(model, args, kwargs)
    total = table.total(table.costs)
    return {
        "n_ops": len(table.costs),
        "profile_s": took,
        "residual": table.residual,
        "forward": {"sum_s": total.forward_s, "whole_s": forward},
        "backward": {"sum_s": total.backward_s, "whole_s": backward},
        "error": total.seconds / (forward + backward) - 1,
    }


def _whole(model: torch.nn.Module, args: Any, kwargs: Any, n: int = 9) -> tuple[float, float]:
    """Median seconds of the model's forward and of its backward; gradients accumulate as in a step.

    Like the profiler's, rounds during which other processes took the CPU are run again, up to 30 times.
    """
    forward: list[float] = []
    backward: list[float] = []
    for i in range(n + 31):
        start, start_cpu = time.perf_counter(), time.process_time()
        out = model(*args, **kwargs)
        middle = time.perf_counter()
        (out if torch.is_tensor(out) else out.loss).backward()
        end = time.perf_counter()
        alone = time.process_time() - start_cpu > 0.97 * (end - start)
        if i and (alone or i > 30):
            forward.append(middle - start)
            backward.append(end - middle)
        if len(forward) == n:
            break
    return statistics.median(forward), statistics.median(backward)


def symbolic(name: str = "gpt2") -> dict[str, Any]:
    """Formulas through three profiles against profiles at five other sizes."""
    model, args, kwargs = build(name, n_layer=2)
    captured = autopipe.capture(model, args, kwargs)

    def measure(batch: int, seq: int) -> Any:
        return profile(captured, dims={"batch": batch, "seq": seq}, min_s=0.5, progress=False)

    fitted = fit_costs(captured, [measure(*at) for at in FITTED])
    rows = []
    for batch, seq in PREDICTED:
        measured, predicted = measure(batch, seq), fitted.at({"batch": batch, "seq": seq})
        a, b = (t.total(t.costs).seconds for t in (predicted, measured))
        rows.append({"batch": batch, "seq": seq, "predicted_s": a, "measured_s": b, "error": a / b - 1})
    errors = [abs(r["error"]) for r in rows]
    return {
        "fitted_at": FITTED,
        "fit_error": fitted.error,
        "rows": rows,
        "mean_error": statistics.fmean(errors),
        "max_error": max(errors),
    }


def deep(name: str = "gpt2") -> dict[str, Any]:
    """Seconds to profile 96 blocks over seconds to profile 4 of the same width, a fixed number of passes."""
    seconds = {}
    for n in (4, 96):
        model, args, kwargs = build(name, batch=1, n_layer=n)
        captured = autopipe.capture(model, args, kwargs)
        seconds[n] = min(_timed(lambda c=captured: profile(c, min_s=0.0, progress=False)) for _ in range(2))  # type: ignore[misc]
    return {"blocks_4_s": seconds[4], "blocks_96_s": seconds[96], "ratio": seconds[96] / seconds[4]}


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def estimates() -> dict[str, Any]:
    """Estimates against profiles: a generic CPU's description, its efficiency fitted to the other models."""
    described = device("CPU")
    measured, pairs, captures = {}, {}, {}
    for name in MODELS:
        model, args, kwargs = build(name, batch=2)
        captures[name] = autopipe.capture(model, args, kwargs)
        measured[name] = profile(captures[name], progress=False)
        counted = accounts(captures[name], attention=described.attention).accounts
        pairs[name] = [
            pair
            for op, cost in measured[name].costs.items()
            if op in counted and cost.source == "measured"
            for pair in ((counted[op].forward, cost.forward_s), (counted[op].backward, cost.backward_s))
        ]
    rows = {}
    for name, table in measured.items():
        others = [pair for other, found in pairs.items() if other != name for pair in found]
        total = table.total(table.costs).seconds
        row = {"measured_s": total}
        for label, efficiency in (("assumed", None), ("fitted", fit(others, described))):
            guess = estimate(captures[name], described, efficiency=efficiency)
            row[f"{label}_s"] = guess.total(guess.costs).seconds
            row[f"{label}_error"] = row[f"{label}_s"] / total - 1
        rows[name] = row
    return {"rows": rows}
