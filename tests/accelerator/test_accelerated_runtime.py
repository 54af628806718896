"""The runtime on the simulated accelerator: right, without races, and the host never waits after warm-up."""

import pytest
import ranks


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("n_ranks", "schedules"),
    [(1, ["1f1b", "zbv"]), (2, []), (4, ["interleaved"])],
    ids=["one", "two", "four"],
)
def test_schedules(simulated, n_ranks, schedules):
    ranks.run(simulated, "runtime_checks.py", n_ranks, "schedules", *schedules, timeout_s=140)


@pytest.mark.timeout(120)
def test_each_class_of_fault(simulated):
    ranks.run(simulated, "runtime_checks.py", 2, "each_class_of_fault", timeout_s=110)


@pytest.mark.timeout(120)
def test_the_rank_picks_its_device(simulated):
    ranks.run(simulated, "runtime_checks.py", 2, "the_rank_picks_its_device", timeout_s=110)


@pytest.mark.timeout(120)
def test_one_card_runs_many_ranks(simulated):
    ranks.run({**simulated, "SIM_CARD": "one"}, "runtime_checks.py", 2, "one_card_runs_many_ranks")
