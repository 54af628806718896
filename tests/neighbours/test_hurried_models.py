"""Habits around a model of transformers: each trains what was meant, or an error says what to write."""

import pathlib

import pytest
from processes import run_ranks

pytest.importorskip("transformers", reason="needs the transformers extra")


@pytest.mark.timeout(200)
def test_right_or_refused():
    run_ranks(pathlib.Path(__file__).parent / "hurried_models_ranks.py", 2, timeout_s=150)
