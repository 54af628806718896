"""Loops as users write them train a pipeline as they train the plain model, in one process and on ranks."""

import pathlib

import loop_ranks
import pytest
from processes import run_ranks

SCRIPT = pathlib.Path(loop_ranks.__file__)
ALWAYS = [f"{loop.__name__}/{('1f1b', 'zb-h1')[i % 2]}" for i, loop in enumerate(loop_ranks.LOOPS)]
"""On ranks each loop always runs on one schedule, and on demand on the other too."""


@pytest.mark.parametrize("check", loop_ranks.CHECKS)
def test_in_one_process(check):
    loop_ranks.CHECKS[check]()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "checks",
    [ALWAYS, pytest.param(sorted({*loop_ranks.CHECKS} - {*ALWAYS}), marks=pytest.mark.slow)],
    ids=["always", "the others"],
)
def test_on_two_ranks(checks):
    run_ranks(SCRIPT, 2, *checks, timeout_s=100)
