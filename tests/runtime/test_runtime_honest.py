"""After a step nothing reads old weights, in one process or many; accumulating and chaining are exact."""

import pathlib

import honest_ranks
import pytest
from processes import run_ranks

SCRIPT = pathlib.Path(honest_ranks.__file__)


@pytest.mark.parametrize("check", honest_ranks.CHECKS)
def test_in_one_process(check):
    honest_ranks.CHECKS[check]()


@pytest.mark.timeout(120)
def test_on_two_ranks():
    run_ranks(SCRIPT, 2, *honest_ranks.CHECKS, timeout_s=100)
