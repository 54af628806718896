"""On several ranks over gloo: the same results as one process, exactly."""

import pathlib

import keep_ranks
import pytest
from processes import run_ranks

SCRIPT = pathlib.Path(__file__).with_name("runtime_ranks.py")


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("check", "n_ranks", "schedules"),
    [
        ("everything", 2, ["interleaved", "looped-bfs", "zbv", "dualpipev"]),
        ("what_hangs_on_ranks", 4, ["gpipe", "1f1b", "zb-h1", "zb-h2"]),
        *(pytest.param("everything", n, [], marks=pytest.mark.slow) for n in (2, 3, 4)),
    ],
    ids=lambda x: "all" if x == [] else "some" if isinstance(x, list) else None,
)
def test_ranks_equal_one_process(check, n_ranks, schedules):
    """Two ranks tell messages of several stages each apart, four hand on; without names, every schedule."""
    run_ranks(SCRIPT, n_ranks, check, *schedules, timeout_s=150)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("check", "n_ranks"),
    [
        ("rendezvous", 3),
        ("replicas", 4),
        ("replicas_in_step", 4),
        ("replicas_with_hooks", 4),
        ("buckets", 2),
        ("shares_of_labels", 2),
        ("released_weights_have_their_shapes", 2),
        ("released_weights_hide_no_rows_that_meet", 2),
        ("wrapping_unties_nothing_in_silence", 2),
        ("messages_of_all_sizes", 3),
        ("patience", 2),
    ],
)
def test_check(check, n_ranks):
    run_ranks(SCRIPT, n_ranks, check, timeout_s=100)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("check", ["checkpoints", "weights_come_and_go"])
def test_check_of_files(check, tmp_path):
    run_ranks(SCRIPT, 2, check, tmp_path, timeout_s=100)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("check", ["sharded_saves", "shared_states"])
def test_saves_of_shards_and_replicas(check, tmp_path):
    run_ranks(SCRIPT, 4, check, tmp_path, timeout_s=100)


@pytest.mark.timeout(120)
def test_memory_does_not_grow():
    run_ranks(SCRIPT, 2, "growth", 300, timeout_s=100)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("check", "n_ranks"),
    [
        ("goes_on", 3),
        ("replicas", 4),
        pytest.param("rebalances", 2, marks=pytest.mark.slow),
        ("rebalances", 3),
    ],
)
def test_what_outlasts_a_step(check, n_ranks, tmp_path):
    run_ranks(pathlib.Path(keep_ranks.__file__), n_ranks, check, str(tmp_path), timeout_s=100)
