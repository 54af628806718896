"""Ranks whose hash seeds differ record the same graph, though code of the model loops over a set."""

import pathlib
import re

from processes import run_ranks

SCRIPT = pathlib.Path(__file__).parent / "hash_seeds.py"


def test_ranks_with_other_hash_seeds_hold_the_same_graph():
    first, second = run_ranks(SCRIPT, 2, timeout_s=120)
    assert re.search(r"^\w{8,} \d\.\d{6}$", first, re.MULTILINE)
    assert first == second
