"""Loops as users write them train a pipeline as they train the plain model, in one process and on ranks."""

import pathlib

import loop_ranks
import pytest
from processes import run_ranks

SCRIPT = pathlib.Path(loop_ranks.__file__)


@pytest.mark.parametrize("check", loop_ranks.CHECKS)
def test_in_one_process(check):
    loop_ranks.CHECKS[check]()


@pytest.mark.timeout(120)
def test_on_two_ranks():
    run_ranks(SCRIPT, 2, *loop_ranks.CHECKS, timeout_s=100)
