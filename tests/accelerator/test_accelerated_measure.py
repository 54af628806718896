"""The profiler on the simulated accelerator."""

import pytest


@pytest.mark.timeout(150)
@pytest.mark.parametrize("check", ["costs", "host_and_device", "the_host_decides_the_cut"])
def test_measures(on_ranks, check):
    on_ranks("measure_checks.py", 1, check, timeout_s=140)
