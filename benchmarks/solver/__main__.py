"""Published instances, ``python -m benchmarks.solver FILE... [--devices K] [--json]``, or synthetic families.

Without files the families are solved; ``--time-limit`` holds per problem.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from .published import is_instance, solve_file
from .sweep import sweep


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solver", description=__doc__)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--devices", type=int, help="instead of a file's own number; families have 8")
    parser.add_argument("--time-limit", type=float, help="seconds per problem: 30 for files, 10 for families")
    parser.add_argument("--no-overlap", action="store_true", help="families: transfers add to work")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.files:
        rows = published(given.files, given.devices, given.time_limit or 30.0)
    else:
        rows = sweep(given.devices or 8, given.time_limit or 10.0, not given.no_overlap)
    if given.json:
        print(json.dumps(rows))
        return
    for row in rows:
        proof = "proved" if row["proved"] else "not proved"
        what = f"{row['file']}: {row['max_load']}" if given.files else _family(row)
        print(f"{what}, {proof}, {row['seconds']:.2f} s")


def published(files: list[str], n_devices: int | None, time_limit_s: float) -> list[dict[str, Any]]:
    """A row per file; one that holds no instance is named and left out."""
    rows = []
    for file in files:
        if is_instance(file):
            rows.append(solve_file(file, n_devices, time_limit_s))
        else:
            print(f"{file} is no partitioning instance: it has no nodes; left out", file=sys.stderr)
    return rows


def _family(row: dict[str, Any]) -> str:
    ratios = ", ".join(f"{rule} {r:.2f}×" for rule, r in row["bottleneck_over_ours"].items())
    return f"{row['family']}: {row['ops']} ops, {ratios}, gap {row['gap']:.2%}"


main()
