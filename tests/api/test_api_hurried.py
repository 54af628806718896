"""Habits of a hurried user: each trains the model that was meant, or one error says what to write instead."""

import pathlib

import pytest
from processes import run_ranks


@pytest.mark.timeout(200)
@pytest.mark.parametrize("script", ["hurried_ranks.py", "hurried_loop_ranks.py", "hurried_more_ranks.py"])
@pytest.mark.parametrize("n_ranks", [0, 2])
def test_right_or_refused(script, n_ranks):
    run_ranks(pathlib.Path(__file__).parent / script, n_ranks, timeout_s=150)
