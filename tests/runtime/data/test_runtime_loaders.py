"""A DataLoader's workers come and go while a runtime lives, and harm neither it nor themselves."""

import pathlib

import loader_ranks
import pytest
from processes import run_ranks


@pytest.mark.timeout(120)
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_beside_a_runtime(context):
    outputs = run_ranks(pathlib.Path(loader_ranks.__file__), 2, context, timeout_s=100)
    assert all("alike" in output for output in outputs)
