"""Optimizers that keep something beside their ``state``: moved and saved with it, or refused by name."""

import pathlib

import beside_ranks
import pytest
from processes import run_ranks


@pytest.mark.timeout(120)
@pytest.mark.parametrize("check", ["moves", "saves"])
def test_of_optimizers(check, tmp_path):
    run_ranks(pathlib.Path(beside_ranks.__file__), 2, check, str(tmp_path), timeout_s=100)
