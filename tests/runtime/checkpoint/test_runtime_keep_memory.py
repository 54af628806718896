"""Loading a model made on the meta device holds its parameters once, and little beside them."""

import json
import pathlib

import memory_ranks
import pytest
from processes import run_ranks


@pytest.mark.timeout(150)
def test_peak_memory_while_loading(tmp_path):
    """By the kernel's count of a fresh process; two billion parameters are in ``benchmarks.kept``."""
    (output,) = run_ranks(pathlib.Path(memory_ranks.__file__), 1, str(tmp_path), timeout_s=120)
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert len(rows) == 2
    for row in rows:
        assert row["equal"]
        assert row["loading"] < 1.15, rows
        assert row["at rest"] < 1.02, rows
        assert row["saving"] < 0.15, rows
