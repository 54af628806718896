"""A split GPT-2 in the loops of other libraries reaches what the plain model does there."""

import pathlib
import subprocess
import sys

import pytest
from processes import ROOT, run_ranks

pytest.importorskip("transformers", reason="needs the transformers extra")

SCRIPT = pathlib.Path(__file__).parent / "loop_ranks.py"


def hold(folder, check, *args, script=SCRIPT, n_ranks=2):
    """Train plainly in one process, then on ranks, which compare."""
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, str(script), check, str(folder), *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    run_ranks(script, n_ranks, check, str(folder), *args)


def test_a_loop_that_calls_backward(tmp_path):
    hold(tmp_path, "plainly")


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(tmp_path, precision):
    pytest.importorskip("accelerate", reason="needs the accelerate extra")
    hold(tmp_path, "accelerated", precision)


def test_fabric(tmp_path):
    pytest.importorskip("lightning", reason="needs the lightning extra")
    hold(tmp_path, "fabric")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning(tmp_path, precision):
    pytest.importorskip("lightning", reason="needs the lightning extra")
    hold(tmp_path, "lightning_trainer", precision)
