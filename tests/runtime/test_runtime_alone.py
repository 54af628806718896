"""What one rank or one replica finds alone, all of them hear: losses, overflows, calls, failed loads."""

import pathlib

import alone_ranks
import pytest
from processes import run_ranks


@pytest.mark.timeout(120)
@pytest.mark.parametrize("check", ["losses", "scaled", "calls", "rows", "shared_states"])
def test_of_replicas(check, tmp_path):
    run_ranks(pathlib.Path(alone_ranks.__file__), 4, check, str(tmp_path), timeout_s=100)
