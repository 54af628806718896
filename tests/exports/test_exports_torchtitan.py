"""torchtitan's hook: its parts, filled by its own calls, train under torch's schedules as the model does."""

import importlib.util
import pathlib

import pytest
from processes import run_ranks

SCRIPT = pathlib.Path(__file__).parent / "titan_ranks.py"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_parts_train_as_the_model(schedule):
    run_ranks(SCRIPT, 2, schedule, timeout_s=100)


@pytest.mark.timeout(200)
@pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None,
    reason="needs torchtitan, which no extra brings: pip install torchtitan",
)
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_torchtitans_own_model_trains(schedule):
    run_ranks(SCRIPT, 2, schedule, "real", timeout_s=180)


def test_what_parts_would_not_do_is_refused():
    run_ranks(SCRIPT, 2, "refusals")
