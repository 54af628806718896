"""Runs ``python -m benchmarks.same``: attention calls and step times of model and pipe.

Models are in ``models``; measuring in one process is left to ``paired``, on two ranks to ``ranks``.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

from ..runtime.ranks import launch
from .models import CASES
from .paired import paired

TIMEOUT_S = 600.0


def measure(name: str, mask: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """What was found of one model under one kind of mask."""
    sizes = {"length": chosen.length, "width": chosen.width}
    found = {"model": name, "mask": mask, **paired(name, mask, n_pairs=chosen.pairs, **sizes)}
    if not chosen.one_process:
        found |= launch(
            "two_ranks",
            2,
            TIMEOUT_S,
            module="benchmarks.same.ranks",
            model=name,
            mask=mask,
            n_microbatches=chosen.microbatches,
            n_steps=chosen.pairs,
            **sizes,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same")
    parser.add_argument("models", nargs="*", default=[*CASES])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--one-process", action="store_true", help="leave out the two ranks")
    parser.add_argument("--json", type=pathlib.Path, help="where all that was measured is kept")
    chosen = parser.parse_args()
    print(f"{'model':10}{'mask':8}{'calls':8}{'crossing':>9}{'pipe / model':>14}{'2 ranks / bound':>17}")
    rows = []
    for name in chosen.models:
        for mask in CASES[name].masks:
            row = measure(name, mask, chosen)
            rows.append(row)
            said = "equal" if row["equal_calls"] else "differ"
            over = f"{row['over_bound']:.3f}" if "over_bound" in row else "–"
            line = f"{name:10}{mask:8}{said:8}{row['masks_crossing']:9}{row['ratio']:14.3f}{over:>17}"
            print(line, flush=True)
            if chosen.json:
                chosen.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
