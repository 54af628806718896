"""Habits of a hurried user: each trains the model that was meant, or one error says what to write instead."""

import pathlib

import pytest
from processes import run_ranks


@pytest.mark.timeout(200)
@pytest.mark.parametrize("script", ["hurried", "hurried_loop", "hurried_more", "hurried_again"])
@pytest.mark.parametrize("n_ranks", [0, 2])
def test_right_or_refused(script, n_ranks):
    run_ranks(pathlib.Path(__file__).parent / f"{script}_ranks.py", n_ranks, timeout_s=150)
