"""Adapters over a quantised base, saved alone from two ranks: those of the plain loop."""

import importlib.util
import pathlib

import pytest
from processes import run_ranks

pytest.importorskip("peft", reason="needs the peft extra")
SCRIPT = pathlib.Path(__file__).parent / "quantised_ranks.py"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["numbers", "bitsandbytes", "torchao"])
def test_adapters_of_two_ranks(kind, tmp_path):
    if kind != "numbers" and importlib.util.find_spec(kind) is None:
        pytest.skip(f"needs {kind}")
    run_ranks(SCRIPT, 0, kind, str(tmp_path), timeout_s=90)
    run_ranks(SCRIPT, 2, kind, str(tmp_path), timeout_s=90)
