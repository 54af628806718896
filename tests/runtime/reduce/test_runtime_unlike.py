"""What not every rank or replica does, or measures, alike: it is as if all did, or refused on all of them."""

import pathlib

import pytest
import unlike_ranks
from processes import run_ranks


@pytest.mark.timeout(120)
@pytest.mark.parametrize("check", ["wraps", "frozen", "within", "zeroes", "shards", "counted_on", "cuts"])
def test_replicas(check):
    run_ranks(pathlib.Path(unlike_ranks.__file__), 4, check, timeout_s=100)
