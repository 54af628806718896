"""``python -m benchmarks.solver FILE... [--devices K] [--time-limit S] --json``: published instances."""

from __future__ import annotations

import argparse
import json
import sys

from .published import is_instance, solve_file


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solver")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--time-limit", type=float, default=30.0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = []
    for file in given.files:
        if is_instance(file):
            rows.append(solve_file(file, given.devices, given.time_limit))
        else:
            print(f"{file} is no partitioning instance: it has no nodes; left out", file=sys.stderr)
    if given.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(f"{row['file']}: {row['max_load']} proved={row['proved']} {row['cpu_seconds']:.3f} CPU s")


main()
