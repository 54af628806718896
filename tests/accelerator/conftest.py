"""The simulated accelerator for the tests of this folder: built once, used in processes of their own."""

import os
import pathlib
import shutil
import sys

import pytest
from processes import PATHS, run_ranks

NEEDED = "AUTOPIPE_NEEDS_SIMULATED"
"""Set where a missing compiler must fail the tests, not skip them."""


@pytest.fixture(scope="session")
def simulated():
    """The environment for processes that ``import simulated``; skips where it cannot be built."""
    missing = [tool for tool in ("g++", "ninja") if _which(tool) is None]
    if missing:
        reason = f"the simulated accelerator needs {' and '.join(missing)} to be built"
        if NEEDED in os.environ:
            pytest.fail(f"{reason}, and {NEEDED} is set")
        pytest.skip(reason)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS)), "OMP_NUM_THREADS": "1"}
    script = pathlib.Path(__file__).with_name("build_simulated.py")
    run_ranks(script, 0, timeout_s=280, environment=environment)
    return environment


@pytest.fixture(scope="session")
def on_ranks(simulated):
    """Runs a script of this folder on ranks with a device for each and one more; what they printed."""

    def run(script, n_ranks, *arguments, timeout_s=100, **more):
        environment = {**simulated, "SIM_DEVICES": str(n_ranks + 1), **more}
        path = pathlib.Path(__file__).with_name(script)
        return run_ranks(path, n_ranks, *arguments, timeout_s=timeout_s, environment=environment)

    return run


def _which(tool):
    return shutil.which(tool) or shutil.which(str(pathlib.Path(sys.executable).parent / tool))
