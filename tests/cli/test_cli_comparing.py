"""What `compare` says of schedules that a plan's memory limit has no room for, and of no counts at all."""

import dataclasses

import pytest
from typer.testing import CliRunner

from autopipe.cli.app import app
from autopipe.cli.comparing import comparison
from autopipe.simulator import simulate
from benchmarks.solver.audit import drawn


def test_what_is_over_a_memory_limit_comes_last_and_says_so():
    plan = drawn(64).plan(n_microbatches=8)
    limits = list(simulate(plan).peak_bytes)
    plan = dataclasses.replace(plan, settings={**plan.settings, "memory_limit": limits})
    table = comparison([(plan, 8, None)], ["gpipe", "1f1b"])
    names = [column.key for column in table.columns]
    first, last = (dict(zip(names, row, strict=True)) for row in table.rows)
    assert (first["schedule"], first["problem"]) == ("1f1b", "")
    assert last["schedule"] == "gpipe"
    assert "limit" in last["problem"]


@pytest.mark.parametrize("counts", ["", ",", " , "])
def test_no_count_of_stages_is_refused(counts):
    told = CliRunner().invoke(app, ["compare", "autopipe/cli/sample.py:small", "--stages", counts])
    assert told.exit_code == 2
    assert "--stages" in told.stderr
