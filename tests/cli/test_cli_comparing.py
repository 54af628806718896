"""What `compare` says of schedules that a plan's memory limit has no room for."""

import dataclasses

from autopipe.cli.comparing import comparison
from autopipe.simulator import simulate
from benchmarks.solver.audit import drawn


def test_what_is_over_a_memory_limit_comes_last_and_says_so():
    plan = drawn(64).plan(n_microbatches=8)
    limits = list(simulate(plan).peak_bytes)
    plan = dataclasses.replace(plan, settings={**plan.settings, "memory_limit": limits})
    table = comparison([(plan, 8)], ["gpipe", "1f1b"])
    names = [column.key for column in table.columns]
    first, last = (dict(zip(names, row, strict=True)) for row in table.rows)
    assert (first["schedule"], first["problem"]) == ("1f1b", "")
    assert last["schedule"] == "gpipe"
    assert "limit" in last["problem"]
