"""What user code writes to between steps on one rank alone is not lost without a word."""

import pathlib

import pytest
from processes import run_ranks

SCRIPT = pathlib.Path(__file__).with_name("written_ranks.py")


@pytest.mark.timeout(120)
def test_on_two_ranks(tmp_path):
    checks = (
        "on_one",
        "uncut",
        "counted",
        "losses",
        "beside_a_load",
        "unseen",
        "by_its_own",
        "alike",
        "scales",
    )
    run_ranks(SCRIPT, 2, *checks, timeout_s=100, environment={"FOLDER": str(tmp_path)})
