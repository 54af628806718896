"""The runtime on the simulated accelerator: right, without races, and the host never waits after warm-up."""

import pathlib

import pytest
from processes import run_ranks

HERE = pathlib.Path(__file__).parent
USERS = (
    *("mixed_precision", "half_weights", "default_device", "pinned_loader", "inputs_with_gradients"),
    *(
        "labels_on_the_device",
        "calls_of_other_kinds",
        "other_devices",
        "labels_elsewhere",
        "watched",
        "layouts",
        "side_by_side",
        "overflow_on_one_stage",
        "demo_program",
    ),
)
"""Those of ``user_checks.py`` that always run; ``run_ranks`` on it without names runs all."""


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("n_ranks", "schedules"),
    [
        (1, ["1f1b", "zbv"]),
        (2, ["gpipe", "interleaved", "zb-h1", "zbv", "cost-aware"]),
        pytest.param(2, [], marks=pytest.mark.slow),
        (4, ["interleaved"]),
    ],
    ids=["one", "two", "two, all", "four"],
)
def test_schedules(on_ranks, n_ranks, schedules):
    on_ranks("accelerated_checks.py", n_ranks, "schedules", *schedules, timeout_s=140)


@pytest.mark.timeout(150)
def test_activations_on_the_host(on_ranks):
    on_ranks("accelerated_checks.py", 2, "activations_on_the_host", timeout_s=140)


@pytest.mark.timeout(120)
def test_each_class_of_fault(on_ranks):
    on_ranks("accelerated_checks.py", 2, "each_class_of_fault", timeout_s=110)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("check", ["the_rank_picks_its_device", "the_links_are_probed", "the_job_is_joined"])
def test_of_the_job(on_ranks, check):
    on_ranks("accelerated_checks.py", 2, check, timeout_s=110)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("card", [{"SIM_CARD": "one"}, {"SIM_BUS": "7"}], ids=["whole", "its instances"])
def test_one_card_runs_many_ranks(on_ranks, card):
    on_ranks("accelerated_checks.py", 2, "one_card_runs_many_ranks", **card)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "words", [[], pytest.param(["whole"], marks=pytest.mark.slow)], ids=["part", "whole"]
)
@pytest.mark.parametrize("card", [{}, {"SIM_CARD": "one"}], ids=["two cards", "one card"])
def test_every_kind_of_value_crosses(on_ranks, card, words):
    on_ranks("crossing_checks.py", 2, *words, SIM="1", **card)


@pytest.mark.timeout(120)
def test_every_kind_of_value_crosses_on_the_host():
    run_ranks(HERE / "crossing_checks.py", 2)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "words", [[], pytest.param(["whole"], marks=pytest.mark.slow)], ids=["part", "whole"]
)
@pytest.mark.parametrize(
    ("n_ranks", "checks"),
    [
        (2, ["tails", "one_rank_feeds", "shapes_may_depend_on_data", "accumulation_and_zero_grad"]),
        (2, ["weights_come_and_go", "checkpoints", "released_weights_have_their_shapes"]),
        (4, ["data_parallel", "gathers"]),
        (2, ["buckets"]),
    ],
    ids=lambda checks: checks[0] if isinstance(checks, list) else None,
)
def test_check_of_the_runtime(on_ranks, n_ranks, checks, words):
    on_ranks("shared_checks.py", n_ranks, *words, *checks, timeout_s=180)


@pytest.mark.timeout(200)
def test_programs_of_users(on_ranks):
    on_ranks("user_checks.py", 2, *USERS, timeout_s=180)
