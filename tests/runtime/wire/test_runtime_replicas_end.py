"""A rank that stops ends every replica of the pipeline, not its own alone."""

import pathlib

import pytest
import stopped_ranks
from processes import finish, start


@pytest.mark.timeout(100)
def test_a_stopped_rank_ends_all_replicas(tmp_path):
    results = finish(start(pathlib.Path(stopped_ranks.__file__), 4, str(tmp_path)), 70)
    for code, output in results[:3]:
        assert code == 0, output[-3000:]
        assert "told after" in output
