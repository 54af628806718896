"""A job that is started again goes on from its last whole save, on as many ranks or on others."""

import pathlib

import pytest
import restart_ranks
from processes import run_ranks


@pytest.mark.timeout(150)
def test_a_killed_rank_and_another_number_of_ranks(tmp_path):
    (output,) = run_ranks(pathlib.Path(restart_ranks.__file__), 1, str(tmp_path), timeout_s=120)
    assert "went on" in output
