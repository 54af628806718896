"""Every synthetic family solved under a time limit, and held against the splits of simpler rules.

The rules, from their published descriptions, cut the ops in program order:

``uniform``: equal counts of ops. ``parameters`` (DeepSpeed's default): the largest stage's parameters are
least. ``compute`` (torchgpipe's balance by time, DeepSpeed's by any weight): the largest stage's work is
least. None of them counts what crosses.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any

from autopipe.solve import Problem, chain

from .families import problems


def sweep(n_stages: int, time_limit_s: float, overlap: bool = True) -> list[dict[str, Any]]:
    """A row per family: size, certificate, time, and each rule's bottleneck over the solver's.

    ``overlap``: transfers hide behind work, as they do by default.
    """
    made = ((name, dataclasses.replace(p, overlap=overlap)) for name, p in problems(n_stages))
    return [_row(name, problem, time_limit_s) for name, problem in made]


def _row(name: str, problem: Problem, time_limit_s: float) -> dict[str, Any]:
    started, cpu = time.perf_counter(), time.process_time()
    answer = chain(problem, time_limit_s=time_limit_s)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    rules = {
        "uniform": [1] * len(problem.items),
        "parameters": [i.static_bytes for i in problem.items],
        "compute": [i.work_ns for i in problem.items],
    }
    reached = {rule: least_largest(w, problem.n_stages) for rule, w in rules.items()}
    ratios = {
        rule: problem.bottleneck(problem.loads(split)) / answer.bottleneck_ns
        for rule, split in reached.items()
    }
    return {
        "family": name,
        "ops": len(problem.items),
        "proved": answer.proved,
        "gap": answer.bottleneck_ns / max(1, answer.lower_ns) - 1,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "bottleneck_over_ours": ratios,
    }


def least_largest(weights: Sequence[int], n_stages: int) -> list[int]:
    """The cut of a sequence into stages whose largest sum is least, earlier stages filled first."""
    sums = [0, *itertools.accumulate(weights)]

    def cuts(limit: int) -> list[int]:
        ends = [0]
        while len(ends) <= n_stages and ends[-1] < len(weights):
            ends.append(bisect.bisect_right(sums, sums[ends[-1]] + limit) - 1)
        return ends

    low, high = max(weights), sums[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if cuts(middle)[-1] == len(weights) else (middle + 1, high)
    ends = cuts(low)
    return [s for s in range(len(ends) - 1) for _ in range(ends[s + 1] - ends[s])]
