"""The profiler on the simulated accelerator."""

import pytest
import ranks


@pytest.mark.timeout(150)
@pytest.mark.parametrize("check", ["costs", "host_and_device"])
def test_measures(simulated, check):
    ranks.run(simulated, "measure_checks.py", 1, check, timeout_s=140)
