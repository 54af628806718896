"""``python -m traps [names]`` from ``tests/``, of traps or rooms: prints verdicts, the wrong ones first."""

from __future__ import annotations

import sys
import time

from .registry import TRAPS
from .verdict import verdict

wanted = sys.argv[1:]
found = []
for name, trap in TRAPS.items():
    if wanted and not any(w in name or w == trap.room for w in wanted):
        continue
    start = time.perf_counter()
    try:
        outcome, said = verdict(trap)
    except Exception as error:  # a trap that does not run is shown as such
        outcome, said = "broken", f"{type(error).__name__}: {error}"
    is_met = outcome == trap.outcome or (trap.outcome == "safe" and outcome in ("right", "refused"))
    found.append((is_met, name, outcome, trap.outcome, said, time.perf_counter() - start))
for is_met, name, outcome, want, said, took in sorted(found, key=lambda f: f[0]):
    print(f"{'  ' if is_met else '! '}{name:32} {outcome:8} (wants {want}) {took:.2f}s  {said[:300]}")
print(f"{sum(f[0] for f in found)} of {len(found)} as wanted, {sum(f[5] for f in found):.0f} s")
