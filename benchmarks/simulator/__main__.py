"""Measures the simulator: its speed by size, its agreement with closed forms, what cost-aware gains.

How well it predicts runs that really happened is left to ``benchmarks.runtime``. Writes JSON to the path
given, or to standard output.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from autopipe.hardware import Cluster, Link
from autopipe.schedule import NAMES, Schedule, StageTimes, Transfer, build, wire_order
from autopipe.simulator import simulate_schedule

SIZES = (("8 × 64", 8, 64), ("32 × 256", 32, 256), ("128 × 1,024", 128, 1024))
SCHEDULES = ("1f1b", "zb-h1", "interleaved", "zbv")
TIMES = (StageTimes(1.0, 2.0, 1.0, 1.0), StageTimes(1.0, 2.5, 1.5, 1.0), StageTimes(2.0, 5.0, 3.0, 2.0))


def seconds(fn: Callable[[], Any], repeats: int) -> float:
    """The median of several runs."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        fn()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def speed() -> list[dict[str, Any]]:
    """Seconds to order a fresh schedule, simulate it with transfers, and take its bubbles apart, by size."""
    rows = []
    for label, n_stages, n in SIZES:
        for name in SCHEDULES:
            n_ranks = n_stages if name in ("1f1b", "zb-h1") else n_stages // 2
            rows.append(_speed(label, name, n_ranks, n_stages, n, repeats=9 if n_stages == 8 else 3))
    return rows


def _speed(label: str, name: str, n_ranks: int, n_stages: int, n: int, repeats: int) -> dict[str, Any]:
    transfers = [Transfer(s, s + 1, 1000) for s in range(n_stages - 1)]
    cluster, times = Cluster.uniform(n_ranks, link=Link(0.01, 1e5)), (StageTimes(),) * n_stages
    start = time.perf_counter()
    schedule = build(name, n_ranks, n_stages, n)
    generate_s = time.perf_counter() - start

    def simulate(source: Schedule) -> Any:
        return simulate_schedule(source, times, transfers, cluster)

    return {
        "size": label,
        "schedule": name,
        "actions": sum(map(len, schedule.actions)),
        "generate_s": generate_s,
        "simulate_fresh_s": seconds(lambda: simulate(dataclasses.replace(schedule)), repeats),
        "simulate_again_s": seconds(lambda: simulate(schedule), repeats),
        "bubbles_s": seconds(lambda: simulate(schedule).bubble, repeats),
        "wire_order_s": seconds(lambda: wire_order(schedule, transfers), repeats),
    }


def closed_forms() -> list[dict[str, Any]]:
    """The largest difference, relative to the step, between simulated steps and their formulas."""
    worst: dict[str, float] = {}
    cases = 0
    for t in TIMES:
        f, b, i, w = t.by_code
        for s in (1, 2, 3, 4, 8, 16):
            for m in (s, 2 * s, 5 * s):
                expected = {
                    "gpipe": (s, (m + s - 1) * (f + b)),
                    "1f1b": (s, (m + s - 1) * (f + b)),
                    "zb-h1": (s, m * (f + i + w) + (s - 1) * (f + i - w)),
                    "interleaved": (2 * s, (2 * m + s - 1) * (f + b)),
                    "forward-only": (s, (m + s - 1) * f),
                }
                for name, (n_stages, step_s) in expected.items():
                    timeline = simulate_schedule(build(name, s, n_stages, m), (t,) * n_stages)
                    worst[name] = max(worst.get(name, 0.0), abs(timeline.step_s / step_s - 1))
                cases += 1
    return [{"schedule": name, "cases": cases, "largest_relative_error": e} for name, e in worst.items()]


def cost_aware(trials: int = 100) -> dict[str, Any]:
    """Step of the best template within the memory budget over the cost-aware one, on random pipelines."""
    rng = random.Random(0)
    gains, taken = [], []
    for _ in range(trials):
        n_ranks, per_rank = rng.choice((2, 4, 8)), rng.choice((1, 2))
        n_stages, n = n_ranks * per_rank, rng.choice((8, 16, 32))
        placement = [r for _ in range(per_rank) for r in range(n_ranks)]
        times = [_uneven(rng) for _ in range(n_stages)]
        transfers = [Transfer(s, s + 1, 100) for s in range(n_stages - 1)]
        cluster = Cluster.uniform(n_ranks, link=Link(0.0, rng.choice((1e9, 1000.0, 300.0))))
        most = (per_rank * n_ranks * rng.choice((1, 2)),) * n_ranks
        steps = {}
        for name in NAMES[1:]:
            start = time.perf_counter()
            schedule = build(
                name,
                n_ranks,
                n_stages,
                n,
                placement=placement,
                times=times,
                transfers=transfers,
                cluster=cluster,
                saved_bytes=(1,) * n_stages,
                budget_bytes=most,
            )
            if name == NAMES[-1]:
                taken.append(time.perf_counter() - start)
            if _peak(schedule) <= most[0]:
                steps[name] = simulate_schedule(schedule, times, transfers, cluster).step_s
        ours = steps.pop(NAMES[-1])
        if steps:
            gains.append(min(steps.values()) / ours)
    return {
        "pipelines": trials,
        "with_a_template_that_fits": len(gains),
        "mean_speedup": statistics.mean(gains),
        "max_speedup": max(gains),
        "min_speedup": min(gains),
        "faster_on": sum(g > 1 + 1e-9 for g in gains),
        "median_search_s": statistics.median(taken),
        "max_search_s": max(taken),
    }


def against_bound(trials: int = 100) -> dict[str, Any]:
    """Cost-aware steps over a lower bound, on random chains with a stage per rank and no memory limit."""
    rng = random.Random(1)
    out: dict[str, Any] = {"pipelines": trials}
    for label, split in (("split_backward", True), ("whole_backward", False)):
        gaps = []
        for _ in range(trials // 2):
            n_ranks, rounds, hop_s = rng.choice((2, 4, 8)), rng.choice((1, 2, 4)), rng.choice((0.0, 0.1, 0.3))
            times = [_uneven(rng) for _ in range(n_ranks)]
            if not split:
                times = [StageTimes(t.forward_s, t.backward_s, 0.0, 0.0) for t in times]
            transfers = [Transfer(s, s + 1, 1) for s in range(n_ranks - 1)]
            cluster, n = Cluster.uniform(n_ranks, link=Link(hop_s, 1e12)), rounds * n_ranks
            schedule = build(
                NAMES[-1], n_ranks, n_ranks, n, times=times, transfers=transfers, cluster=cluster
            )
            step_s = simulate_schedule(schedule, times, transfers, cluster).step_s
            gaps.append(step_s / _bound(times, n, hop_s, split) - 1)
        out[label] = {
            "mean_gap": statistics.mean(gaps),
            "max_gap": max(gaps),
            "met": sum(gap < 1e-6 for gap in gaps) / len(gaps),
        }
    return out


def _bound(times: list[StageTimes], n: int, hop_s: float, split: bool) -> float:
    """No rank starts before its first input, nor is the step done before its work and its gradients' way."""
    bound = 0.0
    for r, t in enumerate(times):
        head = sum(x.forward_s + hop_s for x in times[:r])
        whole = n * (t.forward_s + min(t.backward_s, sum(t.by_code[2:])))
        if split:
            back = sum(min(x.backward_s, x.backward_input_s) + hop_s for x in times[:r])
            last = n * (t.forward_s + t.backward_input_s) + back + times[0].backward_weight_s * (r > 0)
            bound = max(bound, head + whole, head + last)
        else:
            bound = max(bound, head + whole + sum(x.backward_s + hop_s for x in times[:r]))
    return bound


def _uneven(rng: random.Random) -> StageTimes:
    f = rng.uniform(0.7, 1.3)
    i, w = f * rng.uniform(0.8, 1.2), f * rng.uniform(0.6, 1.1)
    return StageTimes(f, 0.97 * (i + w), i, w)


def _peak(schedule: Schedule) -> int:
    """Most microbatches any rank holds at once, each stage's counted."""
    most = 0
    for row in schedule.actions:
        alive = 0
        for a in row:
            alive += (a.kind == "F") - (a.kind in "BW")
            most = max(most, alive)
    return most


def main() -> None:
    result = {
        "environment": {"python": platform.python_version(), "machine": platform.machine()},
        "speed": speed(),
        "closed_forms": closed_forms(),
        "cost_aware": cost_aware(),
        "cost_aware_against_a_bound": against_bound(),
    }
    text = json.dumps(result, indent=1)
    if len(sys.argv) > 1:
        pathlib.Path(sys.argv[1]).write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
