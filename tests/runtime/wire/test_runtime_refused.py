"""What one rank alone is refused, or calls alone, every rank is told within seconds, with the cause."""

import pathlib

import pytest
import refused_ranks
from processes import run_ranks


@pytest.mark.timeout(240)
def test_all_ranks_are_told(tmp_path):
    run_ranks(pathlib.Path(refused_ranks.__file__), 3, str(tmp_path), timeout_s=220)
