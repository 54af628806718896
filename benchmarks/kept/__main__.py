"""``python -m benchmarks.kept [PART]``: prints each part's table and keeps it in ``results.json``.

Parts: ``damages``, ``faults``, ``soak``, ``agents``, ``strangers``, ``large``, ``saves``; all by default.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import pathlib
import tempfile
from typing import Any

from . import agents, faults, judging, large, saves, soak, strangers

RESULTS = pathlib.Path(__file__).with_name("results.json")


def run_damages(n: int, seed: int, **_: Any) -> dict[str, Any]:
    """Outcomes by kind of damage."""
    with tempfile.TemporaryDirectory() as root:
        path = pathlib.Path(root)
        table, bad = judging.walk(path, judging.prepare(path), n, seed)
    totals: collections.Counter[str] = collections.Counter()
    for kind in sorted(table):
        totals.update(table[kind])
        print(f"{kind:28} {', '.join(f'{n} {o}' for o, n in sorted(table[kind].items()))}")
    print(*bad, sep="\n")
    return {"seed": seed, "totals": totals, "kinds": table, "bad": bad}


def run_faults(at_once: int, only: str, **_: Any) -> dict[str, Any]:
    """Outcomes and seconds by moment and fault."""
    rows = []
    chosen = [case for case in faults.cases() if only in " ".join(map(str, case))]
    for row in faults.walk(chosen, at_once):
        rows.append(row)
        print(f"{row['moment']:28} {row['fault']:8} rank {row['rank']} {row['outcome']:9} {row['seconds']} s")
        if row["outcome"] not in faults.GOOD:
            print(*row["told"], sep="\n")
    found = {case_of(row): row for row in [*kept("faults").get("rows", []), *rows]}
    rows = [found[case] for case in faults.cases() if case in found]
    outcomes = collections.Counter(row["outcome"] for row in rows)
    for row in rows:
        if row["outcome"] in faults.GOOD:
            row.pop("told", None)
    return {"outcomes": outcomes, "rows": rows}


def case_of(row: dict[str, Any]) -> tuple[str, str, int]:
    """Which case a row is of."""
    return row["moment"], row["fault"], row["rank"]


def kept(part: str) -> dict[str, Any]:
    """What was found before."""
    found: dict[str, Any] = (json.loads(RESULTS.read_text()) if RESULTS.exists() else {}).get(part, {})
    return found


def run_soak(seconds: float, seed: int, **_: Any) -> dict[str, Any]:
    """What a soak came to."""
    found = dataclasses.asdict(soak.soak(seconds, seed))
    print(found)
    return {"seconds": seconds, "seed": seed, **found}


def run_agents(**_: Any) -> dict[str, Any]:
    """What a restart on fewer ranks came to."""
    found = agents.measure()
    print(found)
    return found


def run_strangers(steps: int, seed: int, **_: Any) -> dict[str, Any]:
    """What strangers at a job's ports came to."""
    found = dataclasses.asdict(strangers.meet(steps, seed))
    print(found)
    return {"steps": steps, "seed": seed, **found}


def run_large(**_: Any) -> dict[str, Any]:
    """Memory of each rank over its own parameters."""
    found = large.measure()
    for name, ranks in found.items():
        for rank, row in enumerate(ranks):
            print(name, rank, {key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()})
    return dict(found)


def run_saves(**_: Any) -> dict[str, Any]:
    """Throughput and stall."""
    found = {"throughput": saves.measure(), "stall_s": saves.stall()}
    print(json.dumps(found, indent=1))
    return found


PARTS = {
    "damages": run_damages,
    "faults": run_faults,
    "soak": run_soak,
    "agents": run_agents,
    "strangers": run_strangers,
    "large": run_large,
    "saves": run_saves,
}


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="all by default")
    parser.add_argument("-n", type=int, default=3000, help="how many damages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the soak")
    parser.add_argument("--steps", type=int, default=1000, help="of the job that strangers meet")
    parser.add_argument("--at-once", type=int, default=2, help="faults under way at once")
    parser.add_argument("--only", default="", help="faults whose moment, fault and rank have this in them")
    options = vars(parser.parse_args())
    for part in options.pop("parts") or PARTS:
        found = PARTS[part](**options)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results[part] = found
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
